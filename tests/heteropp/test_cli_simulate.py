"""heteropp-simulate: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import write_cluster

from heteropp.cli.simulate import app
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, write_plan
from heteropp.models.llama.model import LlamaModel

MODEL = LlamaModel(
    name="small",
    layers=6,
    hidden=64,
    heads=4,
    kv_heads=4,
    intermediate=128,
    vocab=64,
    sequence_length=32,
)


def plan_of(micro_batches: int) -> Plan:
    return Plan(
        model=MODEL,
        global_batch=micro_batches,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(
            Pipeline(
                micro_batches=micro_batches,
                stages=tuple(
                    Stage(
                        layers=(2 * s, 2 * s + 2),
                        recompute=False,
                        replicas=(Replica(ranks=(s,), chip=chip, batch_share=1),),
                    )
                    for s, chip in enumerate(("a-mini", "b-mini", "c-mini"))
                ),
            ),
        ),
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_plan(plan_of(8), tmp_path / "plan.json")
    entries = [(f"{letter}-mini", 1) for letter in "abc"]
    cluster = write_cluster(tmp_path / "cluster.toml", *entries)
    return ["--plan", str(tmp_path / "plan.json"), "--cluster", str(cluster)]


def run(arguments: list[str], capsys, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == code, printed.err
    if code:
        assert len(printed.err.strip().splitlines()) == 1
    return printed.err if code else printed.out


def result(arguments: list[str], capsys) -> dict:
    return json.loads(run([*arguments, "--json"], capsys))


def test_the_figures_add_up(files: list[str], capsys) -> None:
    found = result(files, capsys)
    tokens = 8 * MODEL.sequence_length / found["step_s"] / 3
    assert found["tokens_per_chip_per_s"] == pytest.approx(tokens)
    for stage in found["stages"]:
        parts = stage["work"] + stage["communication"] + stage["bubble"]
        assert parts == pytest.approx(1)
    bubbles = [stage["bubble"] for stage in found["stages"]]
    assert found["bubble"] == pytest.approx(sum(bubbles) / 3)
    assert len(found["memory_bytes"]) == 3
    assert found["overruns"] == []


def test_stragglers_and_noise(files: list[str], capsys) -> None:
    plain = result(files, capsys)["step_s"]
    slow = result([*files, "--straggler", "1:3"], capsys)["step_s"]
    assert slow > plain
    both = result([*files, "--straggler", "1:3", "--straggler", "0:2"], capsys)["step_s"]
    assert both > slow
    drawn = {
        seed: result([*files, "--straggler", "any:3", "--seed", str(seed)], capsys)["step_s"]
        for seed in range(4)
    }
    assert len(set(drawn.values())) > 1
    noisy = [*files, "--noise", "0.3", "--seed", "5"]
    assert result(noisy, capsys) == result(noisy, capsys)
    assert result(noisy, capsys)["step_s"] != plain


def test_replicas_that_are_alike_share_a_row(capsys, tmp_path: Path) -> None:
    plan = plan_of(8)
    [pipeline] = plan.pipelines
    stage = pipeline.stages[0]
    both = tuple(Replica(ranks=(r,), chip="a-mini", batch_share=1) for r in (0, 1))
    alike = replace(pipeline, stages=(replace(stage, layers=(0, 6), replicas=both),))
    write_plan(replace(plan, micro_batch=2, global_batch=16, pipelines=(alike,)), tmp_path / "p")
    cluster = write_cluster(tmp_path / "cluster.toml", ("a-mini", 2))
    files = ["--plan", str(tmp_path / "p"), "--cluster", str(cluster)]
    assert "stage 0 ranks 0-1 (2 x a-mini)" in run(files, capsys)
    apart = run([*files, "--straggler", "1:2"], capsys)
    assert "stage 0 rank 0 (a-mini)" in apart and "stage 0 rank 1 (a-mini)" in apart


def test_a_deadlock_is_one_sentence(files: list[str], capsys) -> None:
    sentence = run([*files, "--slack", "0"], capsys, code=1)
    assert "rank 1 at send_activation of micro-batch 1 waits for rank 2" in sentence
    assert result([*files, "--slack", "3"], capsys)["step_s"] > 0


def test_slack_is_for_plans_with_overlap(files: list[str], capsys, tmp_path: Path) -> None:
    write_plan(replace(plan_of(8), overlap=False), tmp_path / "plan.json")
    sentence = run([*files, "--slack", "3"], capsys, code=2)
    assert "expected a plan with overlap" in sentence


def test_what_is_written(files: list[str], capsys, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "plan.png"
    shown = run([*files, "--trace", str(trace), "--picture", str(picture)], capsys)
    assert "stage 2 rank 2 (c-mini)" in shown.replace("\n", " ") or "(c-mini)" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"F", "B", "reduce", "step"}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("3:2", "ranks 0 to 2"),
        ("-1:2", "ranks 0 to 2"),
        ("1", "expected RANK:FACTOR"),
        ("one:2", "expected RANK:FACTOR"),
        ("1:nan", "expected a factor above 0"),
        ("1:0", "expected a factor above 0"),
        ("1:1e9", "at most 1000"),
    ],
)
def test_stragglers_that_cannot_be(files: list[str], capsys, option: str, said: str) -> None:
    assert said in run([*files, f"--straggler={option}"], capsys, code=2)


def test_a_plan_that_does_not_fit_says_where(capsys, tmp_path: Path) -> None:
    plan = replace(plan_of(8), model=replace(MODEL, hidden=512, intermediate=8192))
    write_plan(plan, tmp_path / "plan.json")
    entries = [(f"{letter}-mini", 1) for letter in "abc"]
    cluster = write_cluster(tmp_path / "cluster.toml", *entries)
    files = ["--plan", str(tmp_path / "plan.json"), "--cluster", str(cluster)]
    sentences = result(files, capsys)["overruns"]
    assert len(sentences) == 3
    assert "stage 2 of pipeline 0 needs" in sentences[2]
    assert "on rank 2 at F of micro-batch 0" in sentences[2]
    assert "the chip has 32.0 MiB" in sentences[2]


def test_simulating_does_not_import_torch() -> None:
    code = "import sys, heteropp.cli.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
