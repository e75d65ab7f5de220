"""Ranks that fork from a launcher's process, and say what they import in their first step.

Called with a folder, the program ends with code 1 if they import anything.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from training_run import make_plan, tiny_model, write_text

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.attempt import launcher_store
from heteropp.runtime.ranks.device import open_device
from heteropp.runtime.ranks.launch import launch
from heteropp.runtime.ranks.transport import connect
from heteropp.runtime.trainer import Trainer
from heteropp.runtime.training_run import RankChip, TrainingRun

PLAN = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, True))


def first_step(folder: Path) -> int:
    """A rank: gives 1 if it imports anything in its first step, which it prints, and else 0."""
    rank, world_size, store = int(os.environ["RANK"]), PLAN.world_size, launcher_store(60)
    connect(dist.PrefixStore("world", store), rank, world_size, "gloo")
    run = TrainingRun(
        plan=PLAN,
        cluster=None,
        chips=(RankChip("", "cpu"),) * world_size,
        steps=1,
        output=folder / "run",
        data=folder / "text",
        weights=None,
        resume=False,
        resume_from=None,
        checkpoint_every=0,
        keep=1,
        deadline_s=60,
        seed=0,
        hyperparameters=Hyperparameters(decay_steps=1),
        device="cpu",
    )
    trainer = Trainer(run, open_device("cpu", "", ""), Control(store, rank, world_size))
    trainer.initialise()
    before = set(sys.modules)
    trainer.step()
    imported = sorted(set(sys.modules) - before)
    print(f"rank {rank} imported {imported}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return int(bool(imported))


def main(folder: Path) -> int:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    write_text(folder / "text")
    labels = tuple(f"rank {rank}" for rank in range(PLAN.world_size))
    return launch(first_step, folder, labels=labels, logs=folder / "logs")
