"""Which of the job's starts this is: the launcher starts all ranks again when one fails."""

from __future__ import annotations

import os
from functools import cache

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


@cache
def launcher_store() -> dist.Store:
    """This process's connection to the launcher's store, which outlives the ranks."""
    return next(rendezvous("env://"))[0]


@cache
def attempt() -> int:
    """How often this rank was started before, the same number for all ranks of a start.

    To be called before anything can fail on one machine alone: a start that a rank does not count
    leaves it behind the others.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # several launchers, each of which counts only the failures of its own ranks
    return launcher_store().add(f"starts of rank {os.environ['RANK']}", 1) - 1
