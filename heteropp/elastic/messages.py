"""What the processes of an elastic job tell each other, as plain values.

Nothing here opens a store or a device, so that what decides can be read, and tested, without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["memory", "disk", "peer", "remote"]
# "chip": its chip failed, and is lost; "job": no chip's fault, and would come again; "lost": no
# snapshot is left on the nodes that there are; "other": to be tried again
FailureKind = Literal["chip", "job", "lost", "other"]

GRACE_S = 2.0  # for members that are told to end to do so by themselves, and to say why
KILLED_S = 30.0  # after which a process that was killed should be gone


@dataclass(frozen=True, kw_only=True)
class Progress:
    step: int  # completed
    loss: float | None  # None: not finite
    tokens_per_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class MovedState:
    """State that a member got, in all, from one place."""

    to: str  # member; of a recovery its node, whose members share what they read
    source: Source
    origin: str  # member, node or URL
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """How a generation came to its state."""

    step: int  # completed; training goes on at the next
    moved: tuple[MovedState, ...] = ()
    seconds: float  # that no step ran: of a switch, from step to step; of a recovery, its own

    def bytes_from(self, source: Source) -> int:
        return sum(moved.bytes for moved in self.moved if moved.source == source)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a member ends."""

    kind: FailureKind
    what: str  # a sentence
    nodes: tuple[str, ...] = ()  # of "lost": that held what is missing


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a member's process ended."""

    code: int  # exit code; -9 for signal 9
    killed: bool  # by its agent


@dataclass(frozen=True)
class JobOutcome:
    exit_code: int
    sentence: str | None = None  # what there is to say about it


def node_of(member: str) -> str:
    return member.rpartition("/")[0]
