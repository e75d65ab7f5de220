"""What was expected of a plan when it was made: a part of its file."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of the plan: simulated, and under its planner's own cost model."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    planner: str  # name of the planner that made the plan
    step_s: float  # simulated seconds of a step
    cost_s: float  # seconds of a step under the planner's own cost model
    lower_bound_s: float  # lower bound of cost_s over all plans that the planner may choose
    tokens_per_chip_per_s: float  # simulated tokens per second over the number of chips
    memory_bytes: tuple[int, ...]  # peak memory of each rank, by rank
    capacity_bytes: tuple[int, ...]  # memory of each rank's chip, by rank
