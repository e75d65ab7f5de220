"""Runs of an earlier release, as it left them on the disk: each goes on with the code of today.

`python tests/heteropp/earlier_runs.py FOLDER` adds the runs of the release that it is run with.
A folder holds the plan, the cluster, and `run` as it was after step STOPPED; `losses.json` has what
the run came to without a stop.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elastic_run import Elastic
from layouts import plan_of, scheduled
from training_run import CHIP, Training, several_pipelines, tiny_model

from heteropp.description.plan import Plan
from heteropp.models.llama.model import LlamaModel

EARLIER = Path(__file__).with_name("earlier")
STOPPED, STEPS = 2, 4
SETTINGS = ("--warmup-steps", "2", "--decay-steps", "6", "--seed", "3")
MODEL = tiny_model(
    hidden=4, heads=2, kv_heads=2, intermediate=8, sequence_length=8, dtype="float64"
)
PLANS: dict[str, Callable[[LlamaModel], Plan]] = {
    "1f1b-zero-1": lambda m: plan_of(m, (2, 2), (2, 1), (1, 2)),
    "gpipe-zero-0": lambda m: scheduled(
        plan_of(m, (2, 2), (1, 2), (2, 1), zero_stage=0), "gpipe", 1
    ),
    "interleaved-1f1b": lambda m: scheduled(
        plan_of(m, (2, 2), (2, 2), (1, 1)), "interleaved-1f1b", 2
    ),
    "zb-h1-zero-2": lambda m: scheduled(
        plan_of(m, (1, 3), (2, 1), (1, 2), zero_stage=2), "zb-h1", 1
    ),
    "zb-v": lambda m: scheduled(plan_of(m, (2, 2), (1, 1), (1, 2)), "zb-v", 2),
    "chimera": lambda m: scheduled(plan_of(m, (2, 2), (1, 1), (1, 1)), "chimera", 2),
    "two-pipelines": lambda m: several_pipelines(
        replace(m, tied_embeddings=True), ((1, 3), (1, 1), (1, 1), 2), ((4,), (1,), (2,), 3)
    ),
}
ELASTIC = "elastic"  # on two nodes, stopped at any step: its snapshots are newer than checkpoints
ELASTIC_PLAN = plan_of(MODEL, (2, 2), (2, 1), (1, 1))


def make(name: str, plan: Plan, folder: Path) -> None:
    """Adds a run of a plan that has a checkpoint of step STOPPED."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Training(
            Path(scratch), plan, *SETTINGS, "--steps", str(STEPS),
            "--checkpoint-every", str(STOPPED), "--keep", "2",
        ).finish()  # fmt: skip
        files = ("plan.json", "cluster.toml", CHIP)
        keep(Path(scratch), folder / name, files, whole.losses)
        checkpoint = f"checkpoints/step-{STOPPED:06d}"
        shutil.copytree(whole.output / checkpoint, folder / name / "run" / checkpoint)
        lines = (whole.output / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / name / "run" / "metrics.jsonl").write_text("".join(lines[:STOPPED]))


def make_elastic(folder: Path) -> None:
    """Adds a run that was stopped between checkpoints: snapshots on its nodes' disks are newer."""
    with tempfile.TemporaryDirectory() as scratch:
        one_chip = plan_of(MODEL, (4,), (1,), (1,))
        whole = Training(Path(scratch), one_chip, *SETTINGS, "--steps", "40").finish()
        losses = whole.losses
        shutil.rmtree(whole.output)
        stopped = Elastic(Path(scratch), ELASTIC_PLAN, "--keep-disk-every", "1", *SETTINGS)
        stopped.until(STOPPED)
        stopped.process.send_signal(signal.SIGTERM)
        stopped.wait()
        keep(Path(scratch), folder / ELASTIC, ("plan.json", "cluster.toml", CHIP), losses)
        for name in ("job.json", "metrics.jsonl", "copies", "generations"):
            copy(stopped.output / name, folder / ELASTIC / "run" / name)


def keep(scratch: Path, folder: Path, files: tuple[str, ...], losses: list[float]) -> None:
    (folder / "run").mkdir(parents=True)
    for name in files:
        shutil.copy(scratch / name, folder)
    (folder / "losses.json").write_text(json.dumps(losses) + "\n")


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    for name, plan in PLANS.items():
        make(name, plan(MODEL), given)
    make_elastic(given)
