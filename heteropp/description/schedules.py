"""The schedules that a plan may have, by name."""

from __future__ import annotations

from typing import Literal

Schedule = Literal["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "chimera"]
# those that let a stage hold several ministages
INTERLEAVING: tuple[Schedule, ...] = ("gpipe", "interleaved-1f1b", "zb-v", "chimera")
SLICING: tuple[Schedule, ...] = ("1f1b", "gpipe")  # those that run micro-batches in slices
