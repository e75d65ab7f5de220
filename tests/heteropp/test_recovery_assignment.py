"""Whoever holds and wants what, each rank gets it, and no node what it had or has got already."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from heteropp.layout.boxes import Box, uncovered
from heteropp.layout.hspmd.routing import Transfer
from heteropp.state.recovery.assignment import Assignment, assign
from heteropp.state.recovery.bundles import Want
from heteropp.state.recovery.manifest import SnapshotStep, SnapshotTensor, TierKind
from heteropp.state.recovery.sources import StoredTensor
from heteropp.state.slices.parameter_slice import ParameterSlice
from heteropp.state.slices.quantities import STORED, StoredName

SHAPE = (12, 8)
NAMES = ("layers.0.mlp.up.weight", "layers.1.mlp.up.weight", "norm.weight")


def cut(generator: random.Random) -> list[Box]:
    """The whole parameter in boxes: rows and columns, cut anywhere."""
    edges = [
        sorted({0, size, *generator.sample(range(1, size), generator.randrange(3))})
        for size in SHAPE
    ]
    rows, columns = (list(pairwise(found)) for found in edges)
    return [Box((row, column)) for row in rows for column in columns]


def copies_in(
    tier: TierKind, node: str, boxes: list[Box], quantity: StoredName, name: str
) -> list[StoredTensor]:
    return [
        StoredTensor(
            tier,
            node,
            SnapshotStep(1, 0),
            f"{name} {box.ranges}",
            SnapshotTensor(quantity, name, box, "float32", 0, 4 * box.size, 0),
        )
        for box in boxes
    ]


class Case:
    """Nodes that each hold some boxes of some parameters; the remote store holds all."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.nodes = sorted(generator.choices("abc", k=generator.randint(2, 6)))
        self.copies: list[StoredTensor] = []
        self.wants: list[list[Want]] = [[] for _ in self.nodes]
        for name in NAMES:
            apart = generator.random() < 0.3  # values are cut unlike the optimizer's state
            for quantities in (STORED[:1], STORED[1:]) if apart else (STORED,):
                self._hold(generator, name, quantities)
                self._want(generator, name, quantities)

    def _hold(self, generator: random.Random, name: str, some: tuple[StoredName, ...]) -> None:
        places: list[tuple[TierKind, str]] = [("remote", "")]
        for tier in ("memory", "disk"):
            places += [(tier, node) for node in sorted({*self.nodes})]  # type: ignore
        for tier, node in sorted(places):
            boxes = cut(generator)
            if tier != "remote":
                boxes = generator.sample(boxes, generator.randint(0, len(boxes)))
            for quantity in some:
                self.copies += copies_in(tier, node, boxes, quantity, name)

    def _want(self, generator: random.Random, name: str, some: tuple[StoredName, ...]) -> None:
        boxes = cut(generator)
        for its in self.wants:
            for box in generator.sample(boxes, generator.randint(0, len(boxes))):
                its += [(quantity, ParameterSlice(name, box)) for quantity in some]


class Carried:
    """Follows an assignment: which elements each rank has at a time."""

    def __init__(self, case: Case, assignment: Assignment) -> None:
        self.nodes, self.bundles = case.nodes, assignment.bundles
        self.has: dict[tuple[int, StoredName, str], np.ndarray] = defaultdict(
            lambda: np.zeros(SHAPE, dtype=bool)
        )
        self.remote: dict[tuple[StoredName, str], np.ndarray] = defaultdict(
            lambda: np.zeros(SHAPE, dtype=int)
        )

    def read(self, rank: int, copy: StoredTensor) -> None:
        where = copy.part.box.within(Box(tuple((0, size) for size in SHAPE)))
        assert copy.node in (self.nodes[rank], ""), "a rank reads what its own node holds"
        self.has[rank, *copy.key][where] = True
        if copy.tier == "remote":
            self.remote[copy.key][where] += 1

    def send(self, transfer: Transfer, within: bool) -> None:
        (sender,), receiver = transfer.senders, transfer.receiver
        bundle = self.bundles[transfer.tensor]
        first, *ranges = transfer.box.ranges
        where = tuple(slice(*pair) for pair in ranges)
        assert (self.nodes[sender] == self.nodes[receiver]) is within
        for quantity in bundle.quantities[slice(*first)]:
            assert self.has[sender, quantity, bundle.name][where].all()
            if not within:
                assert not self.node_has(self.nodes[receiver], quantity, bundle.name)[where].any()
            self.has[receiver, quantity, bundle.name][where] = True

    def node_has(self, node: str, quantity: StoredName, name: str) -> np.ndarray:
        every = [self.has[r, quantity, name] for r, other in enumerate(self.nodes) if other == node]
        return np.logical_or.reduce(every)


@pytest.mark.parametrize("seed", range(60))
def test_everyone_gets_what_they_want_and_nothing_travels_twice(seed: int) -> None:
    case = Case(seed)
    assignment = assign(case.copies, case.wants, case.nodes)
    carried = Carried(case, assignment)
    for rank, reads in assignment.reads.items():
        for copy in (copy for lot in reads for copy in lot):
            carried.read(rank, copy)
    for transfer in assignment.across:
        carried.send(transfer, within=False)
    for transfer in assignment.within:
        carried.send(transfer, within=True)
    for rank, its in enumerate(case.wants):
        for quantity, piece in its:
            assert carried.has[rank, quantity, piece.name][
                tuple(slice(*pair) for pair in piece.box.ranges)
            ].all()
    check_remote(case, carried)


def check_remote(case: Case, carried: Carried) -> None:
    """Each tensor is fetched once at most, and for elements that some want and no node has."""
    for key, times in carried.remote.items():
        assert times.max() <= 1
        held = [c.part.box for c in case.copies if c.key == key and c.tier != "remote"]
        for copy in (c for c in case.copies if c.key == key and c.tier == "remote"):
            where = tuple(slice(*pair) for pair in copy.part.box.ranges)
            wanted = [
                common
                for its in case.wants
                for quantity, piece in its
                if (quantity, piece.name) == key
                and (common := piece.box.intersect(copy.part.box)) is not None
            ]
            assert bool(times[where].any()) is bool(uncovered(wanted, held))


def test_what_several_nodes_lack_is_fetched_by_turns() -> None:
    """Ranks fetch equal parts, and so do those of a node that read what it holds for others."""
    boxes = [Box(((row, row + 1), (0, 8))) for row in range(12)]
    wants: list[list[Want]] = [[("value", ParameterSlice(NAMES[0], box)) for box in boxes]] * 4
    remote = copies_in("remote", "", boxes, "value", NAMES[0])
    spread = assign(remote, wants, ["a", "a", "b", "b"])
    assert [len(spread.reads[rank]) for rank in range(4)] == [3, 3, 3, 3]
    on_a = copies_in("memory", "a", boxes, "value", NAMES[0])
    read = assign([*remote, *on_a], [[], [], *wants[2:]], ["a", "a", "b", "b"])
    assert {rank: len(lots) for rank, lots in read.reads.items()} == {0: 6, 1: 6}
    assert sum(transfer.size_bytes for transfer in read.across) == 4 * 12 * 8


def test_memory_is_nearer_than_the_disk_and_the_disk_than_a_peer() -> None:
    whole = [Box(((0, 12), (0, 8)))]
    wants: list[list[Want]] = [[("value", ParameterSlice(NAMES[0], whole[0]))], []]
    places: list[tuple[TierKind, str]] = [
        *(("memory", "a"), ("disk", "a"), ("memory", "b"), ("disk", "b"), ("remote", "")),
    ]
    while places:
        copies = [
            copy
            for tier, node in sorted(places)
            for copy in copies_in(tier, node, whole, "value", NAMES[0])
        ]
        (lot,) = (lot for lots in assign(copies, wants, ["a", "b"]).reads.values() for lot in lots)
        nearest = places.pop(0)
        assert (lot[0].tier, lot[0].node) == nearest
