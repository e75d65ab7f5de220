"""heteropp-search and heteropp-simulate, from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model
from commands import Ended, run_command

from heteropp.cli import search, simulate
from heteropp.description.plan import read_plan
from heteropp.search.planner import PLANNERS

PRESETS = Path(__file__).parents[2] / "heteropp" / "description" / "presets"
COMMANDS = {"search": search.app, "simulate": simulate.app}


def command(name: str, *arguments: object) -> Ended:
    return run_command(COMMANDS[name], arguments)


def test_the_quickstart_plan_mixes_vendors_layers_and_degrees(tmp_path: Path) -> None:
    cluster = PRESETS / "clusters" / "quickstart.toml"
    asked = (
        *("search", "--cluster", cluster, "--model", PRESETS / "models" / "quickstart.toml"),
        *("--global-batch", 16, "--micro-batch-per-replica", 2),
    )
    default = command(*asked, "-o", tmp_path / "auto.json")
    assert default.exit_code == 0, default.stderr
    fastest = read_plan(tmp_path / "auto.json")
    chips = {r.chip for p in fastest.pipelines for stage in p.stages for r in stage.replicas}
    assert len(chips) >= 3
    assert "no plan takes less than" in default.stdout

    found = command(*asked, "--planner", "exact", "-o", tmp_path / "plan.json")
    assert found.exit_code == 0, found.stderr
    stages = read_plan(tmp_path / "plan.json").pipelines[0].stages
    assert len({stage.replicas[0].chip for stage in stages}) >= 3
    assert len({stage.layer_count for stage in stages}) > 1
    assert len({(stage.tp, stage.dp) for stage in stages}) > 1
    for text in ("lower bound", "gap 0.00%", "predicted step", "runner-up"):
        assert text in found.stdout

    simulated = command(
        *("simulate", "--plan", tmp_path / "plan.json", "--cluster", cluster, "--json"),
        *("--trace", tmp_path / "trace.json", "--picture", tmp_path / "timeline.png"),
    )
    assert simulated.exit_code == 0, simulated.stderr
    prediction = read_plan(tmp_path / "plan.json").prediction
    assert prediction is not None and fastest.prediction is not None
    assert fastest.prediction.step_s <= prediction.step_s
    assert json.loads(simulated.stdout)["step_s"] == prediction.step_s
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    leaders = {replica.ranks[0] for stage in stages for replica in stage.replicas}
    assert {event["tid"] for event in events if event["ph"] == "X"} == leaders
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('name = "prod[eu]"\n[[nodes]]\nchip = "a-mini"\n')
    model = ("--model", "quickstart", "--global-batch", 8, "--planner", "uniform")
    found = command("search", "--cluster", cluster, *model)
    assert found.exit_code == 0, found.stderr
    assert "model quickstart on cluster prod[eu]" in found.stdout


@pytest.mark.exhaustive
def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    """Whatever the hash seed and the order of the nodes."""
    entries = [("a-mini", 2), ("b-mini", 1), ("d-mini", 1)]
    model = write_model(tmp_path / "model.toml", tiny_model(6))
    plans = []
    for index, (order, seed) in enumerate([(entries, "1"), (entries[::-1], "2")]):
        cluster = write_cluster(tmp_path / f"{index}.toml", *order)
        plan = tmp_path / f"{index}.json"
        arguments = ("--cluster", cluster, "--model", model, "--global-batch", "8", "-o", plan)
        subprocess.run(
            [sys.executable, "-m", "heteropp.cli.search", *arguments],
            check=True, capture_output=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        plans.append(plan.read_bytes())
    assert plans[0] == plans[1]


def test_what_does_not_fit_is_refused_and_written_only_when_forced(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.toml", ("c-mini", 1), ("d-mini", 1))
    large = tiny_model(8, hidden=512, intermediate=2048, sequence_length=256)
    model = write_model(tmp_path / "model.toml", large)
    arguments = ["--cluster", cluster, "--model", model, "--global-batch", 4]
    arguments += ["-o", tmp_path / "plan.json"]
    refused = command("search", *arguments)
    assert refused.exit_code == 2
    said = [x for x in refused.stderr.splitlines() if not re.match(r"(search|look)ing", x)]
    assert len(said) == 1, refused.stderr
    for text in ("stage ", "needs ", "-mini)", "which has 32.0 MiB"):
        assert text in refused.stderr
    assert not (tmp_path / "plan.json").exists()
    assert command("search", *arguments, "--force").exit_code == 0
    prediction = read_plan(tmp_path / "plan.json").prediction
    assert prediction is not None
    assert any(
        need > capacity
        for need, capacity in zip(prediction.memory_bytes, prediction.capacity_bytes, strict=True)
    )


@pytest.mark.long
def test_json_and_help(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.toml", ("a-mini", 2))
    model = write_model(tmp_path / "model.toml", tiny_model(4))
    found = command("search", "--cluster", cluster, "--model", model, "--global-batch", 4, "--json")
    result = json.loads(found.stdout)
    assert result["step_s"] >= result["lower_bound_s"] > 0
    assert "Examples:" in command("search", "--help").stdout
    assert "Examples:" in command("simulate", "--help").stdout


@pytest.mark.long
def test_nodes_added_and_lost(tmp_path: Path) -> None:
    """What a change of the cluster would do, without writing another cluster file."""
    cluster = write_cluster(tmp_path / "cluster.toml", ("a-mini", 2), ("b-mini", 1))
    fewer = write_cluster(tmp_path / "fewer.toml", ("a-mini", 2))
    model = write_model(tmp_path / "model.toml", tiny_model(4))
    arguments = ("--model", model, "--global-batch", 4, "--json")
    found = command(
        *("search", "--cluster", cluster, *arguments),
        *("--what-if", "-1 b-mini", "--what-if", "+1 a-mini"),
    )
    lost, added = json.loads(found.stdout)["what_if"]
    alone = json.loads(command("search", "--cluster", fewer, *arguments).stdout)
    assert (lost["change"], added["change"]) == ("-1 b-mini", "+1 a-mini")
    assert lost["step_s"] == alone["step_s"]
    ranks = [r for s in added["plan"]["pipelines"][0]["stages"] for r in s["replicas"]]
    assert sum(len(replica["ranks"]) for replica in ranks) == 5


@pytest.mark.long
def test_all_planners_under_one_simulator(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.toml", ("a-mini", 2), ("b-mini", 2))
    model = write_model(tmp_path / "model.toml", tiny_model(4))
    arguments = ("--cluster", cluster, "--model", model, "--global-batch", 8)
    found = command("search", *arguments, "--planner", "all", "--json", "-o", tmp_path / "p.json")
    assert found.exit_code == 0, found.stderr
    result = json.loads(found.stdout)
    verdicts = {verdict["planner"]: verdict for verdict in result["planners"]}
    assert set(verdicts) == set(PLANNERS)
    steps = [verdict["step_s"] for verdict in result["planners"] if "step_s" in verdict]
    assert steps == sorted(steps) and len(steps) >= 5
    assert result["step_s"] == steps[0]
    plan = read_plan(tmp_path / "p.json")
    assert plan.prediction is not None and plan.prediction.planner == result["planner"]
    simulated = command("simulate", "--plan", tmp_path / "p.json", "--cluster", cluster, "--json")
    assert json.loads(simulated.stdout)["step_s"] == steps[0]
    assert "under one simulator" in command("search", *arguments, "--planner", "all").stdout
