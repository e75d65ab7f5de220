"""Quantities of a parameter that lie in the same places and are wanted in the same boxes.

They are decided on and sent as one tensor, with the quantity as its first dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from heteropp.layout.boxes import Box
from heteropp.state.recovery.manifest import TierKind
from heteropp.state.recovery.sources import Key, StoredTensor
from heteropp.state.slices.parameter_slice import ParameterSlice, block_of
from heteropp.state.slices.quantities import StoredName

Want = tuple[StoredName, ParameterSlice]


@dataclass(frozen=True)
class Bundle:
    name: str  # of the parameter
    quantities: tuple[StoredName, ...]
    dtype: str

    @cached_property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def box(self, box: Box) -> Box:
        """Returns where the bundle's tensor holds all quantities of a box of the parameter."""
        return Box(((0, len(self.quantities)), *box.ranges))

    def bytes_of(self, boxes: Collection[Box]) -> int:
        """Returns the bytes that all quantities take in the given boxes of the parameter."""
        elements = sum(box.size for box in boxes)
        return elements * len(self.quantities) * self.itemsize


class Lot(NamedTuple):
    """Where copies of the same box, one for each of a bundle's quantities, lie in one file."""

    tier: TierKind
    node: str
    file: str
    box: Box
    elements: int


@dataclass(frozen=True)
class Together:
    bundle: Bundle
    lots: dict[Lot, tuple[StoredTensor, ...]]  # in the quantities' order
    wanted: dict[int, set[Box]]  # by rank


def bundles(copies: Sequence[StoredTensor], wants: Sequence[Collection[Want]]) -> list[Together]:
    """Returns the bundles of all that is wanted, block by block. wants: by rank."""
    wanted: dict[Key, dict[int, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for rank, its in enumerate(wants):
        for quantity, piece in its:
            wanted[quantity, piece.name][rank].add(piece.box)
    lots: dict[Key, dict[Lot, StoredTensor]] = defaultdict(dict)
    for copy in copies:
        box = copy.part.box
        lots[copy.key][Lot(copy.tier, copy.node, copy.file, box, box.size)] = copy
    alike: list[tuple[str, list[Key]]] = []
    for key in sorted(wanted, key=lambda key: (block_of(key[1]), key[1], key[0])):
        dtype = next(iter(lots[key].values())).part.dtype
        if alike and _go_together(alike[-1], key, dtype, lots, wanted):
            alike[-1][1].append(key)
        else:
            alike.append((dtype, [key]))
    return [
        Together(
            Bundle(keys[0][1], tuple(quantity for quantity, _ in keys), dtype),
            {lot: tuple(lots[key][lot] for key in keys) for lot in lots[keys[0]]},
            wanted[keys[0]],
        )
        for dtype, keys in alike
    ]


def _go_together(
    some: tuple[str, list[Key]],
    key: Key,
    dtype: str,
    lots: dict[Key, dict[Lot, StoredTensor]],
    wanted: dict[Key, dict[int, set[Box]]],
) -> bool:
    first = some[1][0]
    return (
        (some[0], first[1]) == (dtype, key[1])
        and lots[first].keys() == lots[key].keys()
        and wanted[first] == wanted[key]
    )
