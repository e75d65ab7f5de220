"""Every program of examples/, as a person starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_pages.commands import options

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
JOBS = {"slurm.sbatch": "test_slurm.py", "trainjob.yaml": "test_examples.py"}
MOST_LINES = 60
ALSO_LONGER = {"own_model.py"}  # a whole model; tests/heteropp/test_own_model.py trains it


def run(folder: Path, *command: str, **environment: str) -> str:
    """Returns what a program prints; it is started in `folder`, which it may write to."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DITORCH_", "EMUCHIP_"))}
    done = subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_line_computes_on_the_chip_that_the_environment_names(tmp_path: Path) -> None:
    program = str(EXAMPLES / "one_line.py")
    said = run(tmp_path, sys.executable, program, DITORCH_CHIP="b-mini")
    assert "emuchip:0: chip B-MINI of vendor B" in said
    assert re.search(r"at most [1-9]\.\de-0[4-6]", said)  # the chip's own last bits
    said = run(tmp_path, sys.executable, program, DITORCH_VENDOR="cpu")
    assert "cpu: chip" in said and "at most 0.0e+00" in said


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_arrive(tmp_path: Path, transport: str) -> None:
    program = str(EXAMPLES / "messages.py")
    said = run(tmp_path, sys.executable, program, DICOMM_TRANSPORT=transport)
    assert "rank 1: activations of 4 MiB, the last 1048575" in said
    assert "rank 0: gradients of 4 MiB, the last 2097150" in said


@pytest.mark.long
def test_data_parallel_trains_on_two_vendors(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    launcher = (
        (torchrun,) if Path(torchrun).exists() else (sys.executable, "-m", "torch.distributed.run")
    )
    said = run(
        tmp_path,
        *(*launcher, "--standalone", "--nproc-per-node", "2"),
        str(EXAMPLES / "data_parallel.py"),
    )
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 5
    assert "rank 0 trained on a chip of vendor B" in said
    assert "rank 1 trained on a chip of vendor D" in said


@pytest.mark.exhaustive
def test_a_cluster_is_planned_and_drawn(tmp_path: Path) -> None:
    said = run(tmp_path, sys.executable, str(EXAMPLES / "plan_cluster.py"))
    assert re.search(r"predicted: \d+\.\d\d s a step, \d+ tokens/chip/s", said)
    folder = tmp_path / "runs" / "plan-cluster"
    assert (folder / "plan.json").stat().st_size
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_plan_is_trained(tmp_path: Path) -> None:
    said = run(tmp_path, sys.executable, str(EXAMPLES / "train_plan.py"))
    assert len(re.findall(r"^step \d: loss \d\.\d{3}, \d+\.\d\d s$", said, re.MULTILINE)) == 4
    assert (tmp_path / "runs" / "train-plan" / "metrics.jsonl").is_file()


def test_an_operator_is_judged(tmp_path: Path) -> None:
    program = str(EXAMPLES / "judge_operator.py")
    said = run(tmp_path, sys.executable, program, DITORCH_CHIP="b-mini")
    assert "mm of the chip (emuchip:0): passed" in said
    assert "mm with a wrong element (emuchip:0): FAILED" in said and "at [3, 5]" in said


def test_the_job_for_kubernetes_is_one_by_kubeflow_s_schema() -> None:
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    written = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    # what the schema does not have is left out
    assert TrainerV1alpha1TrainJob.from_dict(written).to_dict() == written
    shell = written["spec"]["trainer"]["command"][-1]
    subprocess.run(["bash", "-nc", shell], check=True)
    ours = shell.split("heteropp.cli.train")[1]
    assert set(re.findall(r"--[a-z-]+", ours)) <= options("heteropp-train")


def test_every_example_is_short_listed_and_run_by_a_test() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    this = Path(__file__).read_text()
    for program in PROGRAMS:
        assert f"[{program.name}]({program.name})" in listed
        assert program.name in this
        lines = len(program.read_text().splitlines())
        assert lines <= MOST_LINES or program.name in ALSO_LONGER
    others = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert others == {program.name for program in PROGRAMS} | JOBS.keys()
    for job, test in JOBS.items():
        assert f"[{job}]({job})" in listed
        assert job in (Path(__file__).parent / test).read_text()
