"""What Metis plans for: nodes, a model's profiles, and the limits of its search."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from heteropp.search.metis_files import MetisNode, Profiles

MEMORY_COEFFICIENT = 5.0  # Metis's: a stage needs this many times the profiled memory
Sums = tuple[float, ...]  # running sums over the layers, from 0


@dataclass(frozen=True)
class Row:
    """A chip type's share of a micro-batch at one tensor-parallel degree."""

    seconds: Sums
    between_s: float  # beyond the layers
    held_bytes: Sums  # of one chip
    divided_bytes: Sums  # the same, divided among the stage's replicas
    kept_bytes: Sums  # the same, for each micro-batch in flight
    capacity_bytes: float  # of one chip, for layers


@dataclass(frozen=True, eq=False)
class Problem:
    nodes: tuple[MetisNode, ...]
    profiles: Profiles
    global_batch: int  # sequences a step
    activation_bytes: float  # of one sequence's hidden states
    degrees: tuple[int, ...] = (1, 2, 4)  # of tensor parallelism
    largest_batch: int = 128  # sequences of a micro-batch in one replica
    memory_coefficient: float = MEMORY_COEFFICIENT
    pooled: bool = True  # memory by Metis's rule, see metis_cost; or each chip holds its own
    variance: float = 1.0  # a group has at least this share of the mean number of chips
    permute_length: int = 128  # most groups whose orders are all tried

    @cached_property
    def chips(self) -> int:
        return sum(node.chips for node in self.nodes)

    @cached_property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted({node.chip for node in self.nodes}))

    @cached_property
    def orders(self) -> list[tuple[str, ...]]:
        """Every order of the chip types (Metis's node sequences)."""
        return list(itertools.permutations(self.types))

    @cached_property
    def micro_batch_counts(self) -> list[int]:
        """The numbers of micro-batches that divide the global batch, largest first."""
        return [b for b in range(self.global_batch, 0, -1) if self.global_batch % b == 0]

    @cached_property
    def capacity_bytes(self) -> dict[str, float]:
        """The memory of one chip in bytes, by chip type: the least among the type's nodes."""
        return self._least("capacity_bytes")

    @cached_property
    def intra_bytes_per_s(self) -> dict[str, float]:
        return self._least("intra_bytes_per_s")

    @cached_property
    def inter_bytes_per_s(self) -> dict[str, float]:
        return self._least("inter_bytes_per_s")

    @cached_property
    def collective_bytes_per_s(self) -> dict[str, tuple[float, ...]]:
        """What a group inside one node meets, by chip type and the group's ranks, from 0 on."""
        found = {}
        for chip in self.types:
            largest = max((n for n in self.nodes if n.chip == chip), key=lambda n: n.chips)
            plain = (self.intra_bytes_per_s[chip],) * (largest.chips + 1)
            found[chip] = largest.collective_bytes_per_s or plain
        return found

    def _least(self, name: str) -> dict[str, float]:
        return {
            chip: min(getattr(node, name) for node in self.nodes if node.chip == chip)
            for chip in self.types
        }

    @cached_property
    def parameter_sums(self) -> Sums:
        return sums(self.profiles.parameter_bytes)

    @cached_property
    def layer_shares(self) -> Sums:
        """Running sums of each layer's share of the model's time, on a chip of the first type."""
        added = sums(self.profiles.by_type[self.types[0]][1, 1].seconds)
        return tuple(seconds / added[-1] for seconds in added)

    def row(self, chip: str, tp: int, share: int) -> Row | None:
        """Returns the row of a replica that takes `share` sequences of each micro-batch.

        A share that is not profiled takes as long as the powers of two that add up to it, one after
        another. None where those are not profiled either.
        """
        key = (chip, tp, share)
        if key not in self._rows:
            self._rows[key] = self._make_row(*key)
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[tuple[str, int, int], Row | None]:
        return {}

    def _make_row(self, chip: str, tp: int, share: int) -> Row | None:
        profiles = self.profiles.by_type[chip]
        parts = [share]
        if (tp, share) not in profiles:
            parts = [1 << bit for bit in range(share.bit_length()) if share >> bit & 1]
        if share > self.largest_batch or any((tp, part) not in profiles for part in parts):
            return None
        found = [profiles[tp, part] for part in parts]
        largest = found[-1]
        return Row(
            seconds=sums(_added(profile.seconds for profile in found)),
            between_s=sum(profile.between_s for profile in found),
            held_bytes=sums(self.memory_coefficient * size for size in largest.memory_bytes),
            divided_bytes=sums(largest.divided_bytes),
            kept_bytes=sums(_added(profile.kept_bytes for profile in found)),
            # at least 1: a chip without room for layers is then too small for each of them
            capacity_bytes=max(1.0, self.capacity_bytes[chip] - largest.stage_bytes),
        )


def _added(tables: Iterable[tuple[float, ...]]) -> list[float]:
    return [sum(values) for values in zip(*tables, strict=True)]


def sums(values: Iterable[float]) -> Sums:
    return tuple(itertools.accumulate(values, initial=0.0))
