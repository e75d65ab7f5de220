"""heteropp-train: what it learns, what it leaves, and what it refuses."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import training_run
from training_run import Training, make_plan, tiny_model, wait, write_cluster, write_text

from heteropp.plan import Pipeline, Plan, Prediction, write_plan
from heteropp.schedule import actions as table_of

PLAN = make_plan(tiny_model(), (3, 1), (2, 1), (1, 1), (True, False))


def with_prediction(plan: Plan) -> Plan:
    nothing = (0,) * plan.world_size
    return replace(
        plan,
        prediction=Prediction(
            planner="exact",
            cost_s=1.0,
            step_s=0.5,
            lower_bound_s=0.4,
            tokens_per_chip_per_s=100.0,
            memory_bytes=nothing,
            capacity_bytes=nothing,
        ),
    )


def test_the_loss_falls_and_the_figures_add_up(tmp_path: Path) -> None:
    plan = with_prediction(PLAN)
    training = Training(
        tmp_path, plan, "--steps", "30", "--learning-rate", "1e-2", "--warmup-steps", "3", "--json"
    )
    code, stdout, stderr = training.wait()
    assert code == 0, stderr
    metrics = training.metrics
    assert [line["step"] for line in metrics] == list(range(1, 31))
    assert metrics[0]["loss"] == pytest.approx(5.545, abs=0.05)  # ln 256: nothing is known yet
    assert metrics[-1]["loss"] < 3.6  # ln 26: the letters are known
    rates = [line["learning_rate"] for line in metrics]
    assert rates[:4] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
    tokens = plan.global_batch * plan.model.sequence_length
    for line in metrics:
        assert line["tokens_per_s"] == pytest.approx(tokens / line["step_s"])
        assert line["predicted_step_s"] == 0.5
        assert len(line["peak_memory_bytes"]) == plan.world_size
        assert all(peak > 100_000 for peak in line["peak_memory_bytes"])
        assert 0 <= line["pacing_fidelity"] <= 1
    summary = json.loads(stdout)
    assert summary["last_loss"] == metrics[-1]["loss"]
    assert summary["predicted_step_s"] == 0.5
    assert "measured step" in stderr
    assert "predicted 500.0 ms" in stderr
    for picture in ("loss.png", "timeline.png"):
        assert (training.output / picture).read_bytes().startswith(b"\x89PNG")
    check_trace(plan, training.output / "trace.json")
    assert (training.output / "checkpoints" / "step-000030" / "manifest.json").exists()


def check_trace(plan: Plan, path: Path) -> None:
    """Predicted and measured hold the same actions, in the same order, on one time axis."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(plan.world_size):
        predicted, measured = (
            [e for e in events if e["pid"] == process and e["tid"] == rank] for process in (0, 1)
        )
        actions = table_of(plan.schedule, plan.pipelines[0], plan.place(rank)[1])
        expected = sorted(str(action.kind) for action in actions)
        assert sorted(e["cat"] for e in predicted) == expected
        assert sorted(e["cat"] for e in measured) == expected
    assert min(e["ts"] for e in events if e["pid"] == 1) == 0


def test_torchrun_starts_it_as_well(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    write_text(tmp_path / "text")
    write_cluster(tmp_path, PLAN.world_size)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", "-m", "heteropp.cli.train"),
            *("--cluster", str(tmp_path / "cluster.toml")),
            *("--plan", str(tmp_path / "plan.json"), "--output", str(tmp_path / "run")),
            *("--data", str(tmp_path / "text"), "--steps", "2"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
    )
    code, _, stderr = wait(process, 120)
    assert code == 0, stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_precision_tools_look_at_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = tmp_path / "findings"
    wanted = f'observe = {{output = "{findings}"}}\noverflow = {{output = "{findings}"}}'
    monkeypatch.setenv("DITORCH_PRECISION", wanted)
    Training(tmp_path, PLAN, "--steps", "2").finish()
    modules = []
    for rank in range(PLAN.world_size):
        assert json.loads((findings / f"overflow-rank{rank}.json").read_text())["passed"]
        found = json.loads((findings / f"observe-rank{rank}.json").read_text())
        assert (found["device"], found["steps"]) == ("emuchip:0", 2)
        modules.append({call["first"]["module"] for call in found["observed"]})
    assert len(list(findings.iterdir())) == 2 * PLAN.world_size  # and none of the launcher's
    first, second, last = modules  # the model's own names, wherever a layer lies
    assert "layers.0.attention" in first & second and "layers.3.attention" not in first | second
    assert "layers.3.attention" in last and "layers.0.attention" not in last


def refusal(folder: Path, plan: Plan | str | None, *arguments: str) -> str:
    """The one sentence of a command that is refused."""
    path = folder / "plan.json"
    if isinstance(plan, Plan):
        write_plan(plan, path)
    elif plan is not None:
        path.write_text(plan)
    if not (folder / "text").exists():
        write_text(folder / "text", 1000)
    return training_run.refusal(folder, "--device", "cpu", *arguments)


def test_bad_plans_are_refused(tmp_path: Path) -> None:
    assert "plan.json cannot be read: No such file" in refusal(tmp_path, None)
    assert "plan.json is not JSON" in refusal(tmp_path, "{")
    assert "plan.json: model: missing" in refusal(tmp_path, "{}")
    half = Pipeline(micro_batches=2, stages=PLAN.pipelines[0].stages)
    ranks = len(PLAN.pipelines[0].stages[0].replicas)
    assert ranks == 2
    moved = tuple(
        replace(
            stage,
            replicas=tuple(
                replace(replica, ranks=tuple(rank + 3 for rank in replica.ranks))
                for replica in stage.replicas
            ),
        )
        for stage in half.stages
    )
    two = replace(PLAN, pipelines=(half, replace(half, stages=moved)))
    assert "has 2 pipelines; this release trains one" in refusal(tmp_path, two)
    assert "has schedule gpipe; this release trains 1f1b" in refusal(
        tmp_path, replace(PLAN, schedule="gpipe")
    )
    assert "has ZeRO stage 2; this release trains 0 and 1" in refusal(
        tmp_path, replace(PLAN, zero_stage=2)
    )
    first, second = PLAN.pipelines[0].stages
    stages = (first, replace(second, offload=True))
    offloaded = replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=stages),))
    assert "stages[1] is offloaded, which this release does not train" in refusal(
        tmp_path, offloaded
    )


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_cluster(tmp_path, PLAN.world_size, capacity_bytes=200_000)
    stderr = refusal(tmp_path, PLAN, "--device", "chip")
    assert re.search(
        r"stage 0 needs \d+\.\d KiB on rank \d \(chip neutral.toml\), which has 195.3 KiB", stderr
    )


def test_bad_clusters_are_refused(tmp_path: Path) -> None:
    assert "cluster.toml cannot be read" in refusal(tmp_path, PLAN, "--device", "chip")
    write_cluster(tmp_path, PLAN.world_size + 1)
    assert "the plan has 3 ranks and cluster test 4" in refusal(tmp_path, PLAN, "--device", "chip")


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    assert "learning_rate is -1.0; expected a positive" in refusal(
        tmp_path, PLAN, "--learning-rate", "-1"
    )
    assert "learning_rate is nan" in refusal(tmp_path, PLAN, "--learning-rate", "nan")
    assert "gradient_clip is -2.0" in refusal(tmp_path, PLAN, "--gradient-clip", "-2")
    assert "--device is tpu; expected chip or cpu" in refusal(tmp_path, PLAN, "--device", "tpu")
    assert "--steps" in refusal(tmp_path, PLAN, "--steps", "0")
    assert "No such option" in refusal(tmp_path, PLAN, "--stepz", "1")


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    beneath = str(tmp_path / "file" / "run")
    assert f"folder {beneath} cannot be made: Not a dir" in refusal(
        tmp_path, PLAN, "--output", beneath
    )


def test_bad_data_is_refused(tmp_path: Path) -> None:
    assert "is not a folder of text files" in refusal(
        tmp_path, PLAN, "--data", str(tmp_path / "absent")
    )
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("abc")
    assert "bytes of text; one sequence needs 17" in refusal(
        tmp_path, PLAN, "--data", str(tmp_path / "short")
    )
    small = make_plan(tiny_model(vocab=128), (3, 1), (2, 1), (1, 1), (True, False))
    assert "vocab is 128; bytes need 256" in refusal(tmp_path, small)
