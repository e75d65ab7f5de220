"""Which ranks hold which of a stage's parameters alike: all of them, or the experts apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from heteropp.description.plan import Stage
from heteropp.layout.flat_buffer import Experts


@dataclass(frozen=True)
class Section:
    """Parameters of a stage that some ranks hold the same slices of, in one flat buffer."""

    experts: Experts  # which parameters these are
    peers: tuple[tuple[int, ...], ...]  # those ranks, ascending, by tensor-parallel index

    def shards(self, zero_stage: int) -> int:
        """Returns the number of ranks over which ZeRO shards what one of them would hold."""
        return len(self.peers[0]) if zero_stage else 1


@lru_cache(maxsize=4096)
def sections(stage: Stage) -> tuple[Section, ...]:
    """Returns the sections of a stage: one, or what all groups hold and one for each of `ep`."""
    everyone = tuple(tuple(stage.peers(tp_index)) for tp_index in range(stage.tp))
    if stage.ep == 1:
        return (Section("all", everyone),)
    of_experts = (
        Section(experts, tuple(tuple(sorted(peers)) for peers in zip(*holders, strict=True)))
        for experts, holders in (
            (experts, stage.groups[i :: stage.ep]) for i, experts in enumerate(stage.expert_ranges)
        )
    )
    return (Section("none", everyone), *of_experts)


def sections_of(stage: Stage, tp_index: int, rank: int) -> list[Section]:
    """Returns the sections that a rank holds, in the order of its flat buffers."""
    return [section for section in sections(stage) if rank in section.peers[tp_index]]


def turns(stage: Stage, tp_index: int) -> list[tuple[int, ...]]:
    """Returns the ranks of each turn at a tensor-parallel index, in the order of their shares;
    without expert parallelism each rank is one.
    """
    ranks = [group[tp_index] for group in stage.groups]
    return [tuple(ranks[i : i + stage.ep]) for i in range(0, len(ranks), stage.ep)]


def turn_of(stage: Stage, tp_index: int, rank: int) -> tuple[int, ...]:
    """Returns the turn of a rank: those over which the experts of its rows lie."""
    return next(turn for turn in turns(stage, tp_index) if rank in turn)


def expert_group(stage: Stage, tp_index: int, rank: int) -> dict[int, tuple[int, int]]:
    """Returns the ranks of a rank's turn, ascending, with the experts that each holds."""
    turn = turn_of(stage, tp_index, rank)
    return dict(sorted(zip(turn, stage.expert_ranges, strict=True)))
