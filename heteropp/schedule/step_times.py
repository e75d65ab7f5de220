"""How a rank's step divides into work, communication and bubble, and what its links alone need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heteropp.schedule.action import Kind


@dataclass(frozen=True)
class TimeShare:
    """How a step's time divides, as shares of 1; of a replica, or of a stage on average."""

    work: float  # computing, the tensor-parallel collectives inside it, and the update
    communication: float  # gathers, messages under way, reductions, the exchange of norms
    bubble: float  # waiting for others to compute


@dataclass(frozen=True)
class LinkTimes:
    """Seconds that a rank's messages and collectives take when no one is late.

    All zero where the links are not known: then every wait is bubble.
    """

    messages_s: Mapping[tuple[Kind, int], float] = field(default_factory=dict)  # by receive
    reductions_s: float = 0.0
    exchange_s: float = 0.0  # of the norms
