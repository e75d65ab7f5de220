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
from commands import run_command
from installed import own_mounts
from training_run import Training, make_plan, tiny_model, wait, write_cluster, write_text

from heteropp.cli.train import app
from heteropp.data.convert import convert
from heteropp.data.documents import Document
from heteropp.data.tokenizer import Bytes
from heteropp.description.plan import Plan, write_plan
from heteropp.description.prediction import Prediction
from heteropp.schedule.stage_actions import actions as table_of
from hyperhetero.output import held

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
    convert([Document(b"abcdefgh" * 10, "")] * 9, tmp_path / "other.tokens", Bytes())
    training = Training(
        tmp_path,
        plan,
        *("--steps", "30", "--learning-rate", "1e-2", "--warmup-steps", "3", "--json"),
        *("--validation", str(tmp_path / "other.tokens"), "--validate-every", "12"),
        "--track",
        "tensorboard",
    )
    code, stdout, stderr = training.wait()
    assert code == 0, stderr
    metrics = training.metrics
    assert [line["step"] for line in metrics] == list(range(1, 31))
    assert metrics[0]["loss"] == pytest.approx(5.545, abs=0.05)  # ln 256: nothing is known yet
    assert metrics[-1]["loss"] < 3.6  # ln 26: the letters are known
    validation = {m["step"]: m["validation_loss"] for m in metrics if m["validation_loss"]}
    assert list(validation) == [12, 24, 30]
    by_name = {m["step"]: m["validation_losses"] for m in metrics}
    assert by_name[12] == {"other.tokens": validation[12]} and by_name[13] == {}
    assert 2 < validation[30] < validation[12] < 5.5
    rates = [line["learning_rate"] for line in metrics]
    assert rates[:4] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
    tokens = plan.global_batch * plan.model.sequence_length
    for line in metrics:
        assert line["tokens_per_s"] == pytest.approx(tokens / line["step_s"])
        of_all = line["tokens_per_chip_per_s"] * plan.world_size
        assert of_all == pytest.approx(line["tokens_per_s"])
        assert 0 < line["utilization"] < 1e-3, "the chips are nearly infinitely fast"
        assert 0 < line["bubble"] + line["communication"] < 1
        assert line["predicted_step_s"] == 0.5
        assert len(line["peak_memory_bytes"]) == plan.world_size
        assert all(peak > 100_000 for peak in line["peak_memory_bytes"])
        assert 0 <= line["pacing_fidelity"] <= 1
    summary = json.loads(stdout)
    assert summary["last_loss"] == metrics[-1]["loss"]
    assert summary["validation_loss"] == validation[30]
    assert f"step 30/30  validation loss {validation[30]:.4f}" in stderr
    assert summary["predicted_step_s"] == 0.5
    assert "measured step" in stderr
    assert "predicted 500.0 ms" in stderr
    for picture in ("loss.png", "timeline.png"):
        assert (training.output / picture).read_bytes().startswith(b"\x89PNG")
    check_trace(plan, training.output / "trace.json", [line["step_s"] for line in metrics])
    check_tensorboard(training)
    assert (training.output / "checkpoints" / "step-000030" / "manifest.json").exists()


def check_tensorboard(training: Training) -> None:
    """It reads back what metrics.jsonl holds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(training.output / "tensorboard"))
    events.Reload()
    for name in ("loss", "bubble", "utilization", "tokens_per_chip_per_s"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({m["step"]: m[name] for m in training.metrics}, rel=1e-6)


def check_trace(plan: Plan, path: Path, steps_s: list[float]) -> None:
    """Predicted and measured hold the same actions, in the same order, on one time axis.

    The measured one is of a step that lasted from a rank's first action to the end of its last.
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    longest_s = 0.0
    for rank in range(plan.world_size):
        predicted, measured = (
            [e for e in events if e["pid"] == process and e["tid"] == rank] for process in (0, 1)
        )
        actions = table_of(plan.schedule, plan.pipelines[0], plan.place(rank)[1])
        expected = sorted(str(action.kind) for action in actions)
        assert sorted(e["cat"] for e in predicted) == expected
        assert sorted(e["cat"] for e in measured) == expected
        ended = max(e["ts"] + e["dur"] for e in measured)
        longest_s = max(longest_s, (ended - min(e["ts"] for e in measured)) / 1e6)
    assert longest_s in [pytest.approx(step_s, abs=1e-5) for step_s in steps_s]
    assert min(e["ts"] for e in events if e["pid"] == 1) == 0


@pytest.mark.long
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
            *("--data", str(tmp_path / "text"), "--steps", "2", "--p2p", "cpu-mediated"),
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


@pytest.mark.long
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
    assert "'--learning-rate': expected a finite number, got nan" in refusal(
        tmp_path, PLAN, "--learning-rate", "nan"
    )
    said = refusal(tmp_path, PLAN, "--learning-rate", "-1", "--minimum-ratio", "2")
    assert "learning_rate is -1.0" in said and "minimum_ratio is 2.0; expected 0 to 1" in said
    for option in ("learning-rate", "gradient-clip", "weight-decay"):
        said = refusal(tmp_path, PLAN, f"--{option}", "1e300")
        assert f"{option.replace('-', '_')} is 1e+300; expected " in said
    assert "'--deadline': expected at most" in refusal(tmp_path, PLAN, "--deadline", "inf")
    warmup = ("--warmup-steps", "61", "--steps", "60")
    assert "--warmup-steps is 61, and the learning" in refusal(tmp_path, PLAN, *warmup)
    assert "gradient_clip is -2.0" in refusal(tmp_path, PLAN, "--gradient-clip", "-2")
    assert "--device is tpu; expected chip or cpu" in refusal(tmp_path, PLAN, "--device", "tpu")
    assert "--p2p is tcp; expected device-direct or cpu" in refusal(tmp_path, PLAN, "--p2p", "tcp")
    assert "--device cpu has none" in refusal(
        tmp_path, PLAN, "--p2p", "cpu-mediated", "--device", "cpu"
    )
    assert "--force skips the check of the chips' memory" in refusal(tmp_path, PLAN, "--force")
    assert "--steps" in refusal(tmp_path, PLAN, "--steps", "0")
    assert "No such option" in refusal(tmp_path, PLAN, "--stepz", "1")


def test_a_folder_that_another_run_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    monkeypatch.setenv("DITORCH_CHIP", "")  # which a rank sets, and monkeypatch puts back
    with held(output / ".lock", "it"):
        for rank in (None, "0"):  # rank 0 of torchrun's
            if rank:
                monkeypatch.setenv("RANK", rank)
            for more in ((), ("--resume",)):
                said = refusal(tmp_path, PLAN, *more)
                assert said.startswith(f"{output} is used by process {os.getpid()} on host ")
    monkeypatch.delenv("RANK")
    write_cluster(tmp_path, PLAN.world_size)
    with held(output / ".lock", "it"):
        said = refusal(tmp_path, PLAN, "--elastic")
        assert said.startswith(f"{output} is used by process {os.getpid()} on host ")


def test_a_run_to_resume_is_named_once_and_says_its_plan(tmp_path: Path) -> None:
    for arguments, expected in (
        ([str(tmp_path)], f"{tmp_path} is no option; a run's folder is given to --resume"),
        (["--resume", str(tmp_path)], "does not say what it was started with; give its --plan"),
        (["--resume", "a", "--output", "b"], "--resume a goes on in its own folder; leave out"),
    ):
        result = run_command(app, arguments)
        assert result.exit_code == 2 and expected in result.stderr


def test_too_little_shared_memory_is_said_before_anything_starts(tmp_path: Path) -> None:
    """The launch is refused in a mount namespace with a small /dev/shm, as containers have it."""
    small = "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
    program = (
        "from heteropp.runtime.ranks.launch import launch; from pathlib import Path;"
        f"launch(print, labels=('a',) * 6, logs=Path({str(tmp_path / 'logs')!r}))"
    )
    ended = subprocess.run(
        [*own_mounts(), "sh", "-c", f'{small} exec {sys.executable} -c "{program}"'],
        capture_output=True,
        text=True,
    )
    assert "FileError: /dev/shm has 64 KiB free, and 6 ranks need 136 KiB to start" in ended.stderr
    assert not (tmp_path / "logs").exists()


def test_torchrun_alone_counts_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("DITORCH_CHIP", "")  # which a rank sets, and monkeypatch puts back
    assert "torchrun has --max-restarts" in refusal(tmp_path, PLAN, "--restarts", "1")


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    beneath = str(tmp_path / "file" / "run")
    assert f"{beneath} cannot be written: {tmp_path / 'file'} is a file, not a folder" in refusal(
        tmp_path, PLAN, "--output", beneath
    )


def test_bad_data_is_refused(tmp_path: Path) -> None:
    assert "absent cannot be read: No such file" in refusal(
        tmp_path, PLAN, "--data", str(tmp_path / "absent")
    )
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("abc")
    assert "has 4 tokens; one sequence needs 17" in refusal(
        tmp_path, PLAN, "--data", str(tmp_path / "short")
    )
    convert([Document(b"text " * 99, "")], tmp_path / "x.tokens", Bytes())
    content = (tmp_path / "x.tokens").read_bytes()
    (tmp_path / "x.tokens").write_bytes(content[:-1])
    assert "x.tokens is no token file, or a damaged one" in refusal(
        tmp_path, PLAN, "--data", str(tmp_path / "x.tokens")
    )
    flipped = bytearray(content)
    flipped[-100] ^= 1
    (tmp_path / "x.tokens").write_bytes(flipped)
    for option in ("--data", "--validation"):
        assert (
            "x.tokens is damaged: it does not hold what was written to it, by the sha256 in its "
            "header; make it again with heteropp-data"
        ) in refusal(tmp_path, PLAN, option, str(tmp_path / "x.tokens"))
    (tmp_path / "x.tokens").write_bytes(content.replace(Bytes.sha256.encode(), b"0" * 64))
    others = ("--validation", str(tmp_path / "x.tokens"))
    assert "x.tokens was made with tokenizer bytes, and what" in refusal(tmp_path, PLAN, *others)
    every = refusal(tmp_path, PLAN, "--validate-every", "5")
    assert "--validate-every needs --validation" in every
    small = make_plan(tiny_model(vocab=128), (3, 1), (2, 1), (1, 1), (True, False))
    assert "(tokenizer bytes); the model's vocab is 128" in refusal(tmp_path, small)
