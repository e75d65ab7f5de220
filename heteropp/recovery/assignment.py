"""Who reads which copy, and who passes what on to whom: decided before anything is read.

A tensor is read from the nearest tier that has it: the node's own memory, its disk, another node's
memory or disk, the remote store. Nothing is read twice where once will do: a rank reads for all of
its node, and of the remote store a tensor is fetched once for the whole job. What a node lacks
comes over the network once, to one of its ranks that want it, and from there to the others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from heteropp.boxes import Box, uncovered
from heteropp.checkpoint.manifest import Slice
from heteropp.checkpoint.reader import Quantity
from heteropp.checkpoint.writer import block_of
from heteropp.hspmd.routing import Held, Transfer, Wanted, route
from heteropp.recovery.manifest import TierKind
from heteropp.recovery.sources import Copy, Key

Want = tuple[Quantity, Slice]
SourceKind = Literal["memory", "disk", "peer", "remote"]
NEARNESS: dict[TierKind, int] = {"memory": 0, "disk": 1, "remote": 2}


@dataclass(frozen=True, order=True)
class Moved:
    """State that came to a node from one place; its ranks share it."""

    to: str  # node
    source: SourceKind
    origin: str  # the node, or another one; "" for the remote store
    block: str
    bytes: int


@dataclass(frozen=True)
class Share:
    """What one rank has to do with it."""

    reads: tuple[Copy, ...]
    keys: dict[int, Key]  # of transfers' tensors
    dtypes: dict[int, str]
    # by block, in one order on all ranks: between nodes, then from a node's ranks to its others
    across: dict[str, tuple[Transfer, ...]]
    within: dict[str, tuple[Transfer, ...]]


@dataclass(frozen=True)
class Assignment:
    readers: dict[Copy, int]  # the rank that reads it
    keys: list[Key]  # of transfers' tensors
    across: list[Transfer]
    within: list[Transfer]
    moved: list[Moved]

    def shares(self, ranks: int) -> list[Share]:
        """By rank."""
        across, within = (self._by_rank(transfers) for transfers in (self.across, self.within))
        reads: dict[int, list[Copy]] = defaultdict(list)
        for copy, rank in self.readers.items():
            reads[rank].append(copy)
        dtypes = {copy.key: copy.part.dtype for copy in self.readers}
        shares = []
        for rank in range(ranks):
            used = {t.tensor for some in (across, within) for ts in some[rank].values() for t in ts}
            shares.append(
                Share(
                    tuple(reads[rank]),
                    {tensor: self.keys[tensor] for tensor in sorted(used)},
                    {tensor: dtypes[self.keys[tensor]] for tensor in sorted(used)},
                    {block: tuple(some) for block, some in across[rank].items()},
                    {block: tuple(some) for block, some in within[rank].items()},
                )
            )
        return shares

    def _by_rank(self, transfers: Iterable[Transfer]) -> dict[int, dict[str, list[Transfer]]]:
        """Those that concern a rank, by block in the keys' order."""
        result: dict[int, dict[str, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
        for transfer in sorted(transfers, key=lambda t: t.tensor):
            block = block_of(self.keys[transfer.tensor][1])
            for rank in {*transfer.senders, transfer.receiver}:
                result[rank][block].append(transfer)
        return result


def assign(
    copies: Sequence[Copy], wants: Sequence[Collection[Want]], nodes: Sequence[str]
) -> Assignment:
    """wants and nodes: by rank. The copies are of one step and cover what is wanted."""
    wanted: dict[Key, dict[int, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for rank, its in enumerate(wants):
        for quantity, piece in its:
            wanted[quantity, piece.name][rank].add(piece.box)
    by_key: dict[Key, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_key[copy.key].append(copy)
    reading = _Reading(nodes)
    keys = sorted(wanted, key=lambda key: (block_of(key[1]), key))
    for key in keys:
        reading.choose(by_key[key], wanted[key])
    itemsizes = [_itemsize(by_key[key][0]) for key in keys]
    across, within = _routes(reading, [wanted[key] for key in keys], keys, itemsizes)
    for transfer in across:
        sender, receiver = nodes[transfer.senders[0]], nodes[transfer.receiver]
        block = block_of(keys[transfer.tensor][1])
        reading.moved[receiver, "peer", sender, block] += transfer.size_bytes
    moved = [Moved(*place, size) for place, size in sorted(reading.moved.items())]
    return Assignment(reading.readers, keys, across, within, moved)


def _itemsize(copy: Copy) -> int:
    return copy.bytes // math.prod(copy.part.box.shape)


class _Reading:
    """Chooses copies and readers, key after key, so that tiers' loads are spread over ranks."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.ranks: dict[str, list[int]] = defaultdict(list)
        for rank, node in enumerate(nodes):
            self.ranks[node].append(rank)
        self.readers: dict[Copy, int] = {}
        self.load_bytes: Counter[tuple[TierKind, int]] = Counter()  # by tier and rank
        self.moved: Counter[tuple[str, SourceKind, str, str]] = Counter()

    def choose(self, copies: Sequence[Copy], wanted: dict[int, set[Box]]) -> None:
        """For one key; `wanted` by rank."""
        copies = sorted(copies, key=_order)
        lacking: dict[str, list[Box]] = {}
        for node in self.ranks:
            ranks = [rank for rank in self.ranks[node] if rank in wanted]
            own = [copy for copy in copies if copy.node == node]
            lacking[node] = self._own(node, own, _union(wanted, ranks), ranks)
        for node, boxes in lacking.items():
            others = [c for c in copies if c.node in self.ranks and c.node != node]
            lacking[node] = self._peers(others, boxes)
        self._remote([c for c in copies if c.tier == "remote"], lacking, wanted)

    def _own(
        self, node: str, copies: Sequence[Copy], lacking: list[Box], ranks: Sequence[int]
    ) -> list[Box]:
        for copy in copies:
            rest = uncovered(lacking, [copy.part.box])
            if rest != lacking:
                self._read(copy, ranks)
                size_bytes = (_size(lacking) - _size(rest)) * _itemsize(copy)
                kind: SourceKind = "memory" if copy.tier == "memory" else "disk"
                self.moved[node, kind, node, block_of(copy.part.name)] += size_bytes
                lacking = rest
        return lacking

    def _peers(self, copies: Sequence[Copy], lacking: list[Box]) -> list[Box]:
        """What is read anyhow comes first; else nodes take turns, memory before disk."""
        left = list(copies)
        while left and lacking:
            copy = min(left, key=lambda c: (c not in self.readers, *self._far(c)))
            left.remove(copy)
            rest = uncovered(lacking, [copy.part.box])
            if rest != lacking:
                self._read(copy, self.ranks[copy.node])
                lacking = rest
        return lacking

    def _far(self, copy: Copy) -> tuple[int, int, tuple]:
        return NEARNESS[copy.tier], self._node_load_bytes(copy.tier, copy.node), _order(copy)

    def _remote(
        self, copies: Sequence[Copy], lacking: dict[str, list[Box]], wanted: dict[int, set[Box]]
    ) -> None:
        """Each copy by the node that has fetched least, of those that lack it."""
        for copy in copies:
            lack = [n for n, boxes in lacking.items() if uncovered(boxes, [copy.part.box]) != boxes]
            if not lack:
                continue
            node = min(lack, key=lambda n: (self._node_load_bytes("remote", n), n))
            self._read(copy, [rank for rank in self.ranks[node] if rank in wanted])
            self.moved[node, "remote", "", block_of(copy.part.name)] += copy.bytes
            for n in lack:
                lacking[n] = uncovered(lacking[n], [copy.part.box])

    def _read(self, copy: Copy, ranks: Sequence[int]) -> None:
        if copy not in self.readers:
            rank = min(ranks, key=lambda rank: (self.load_bytes[copy.tier, rank], rank))
            self.readers[copy] = rank
            self.load_bytes[copy.tier, rank] += copy.bytes

    def _node_load_bytes(self, tier: TierKind, node: str) -> int:
        return sum(self.load_bytes[tier, rank] for rank in self.ranks[node])


def _order(copy: Copy) -> tuple:
    """Nearer tiers, then larger boxes: one of them may do where many small ones would."""
    return NEARNESS[copy.tier], -copy.bytes, copy.part.box, copy.node, copy.file


def _union(wanted: dict[int, set[Box]], ranks: Sequence[int]) -> list[Box]:
    """What some of the ranks want, without overlap."""
    result: list[Box] = []
    for box in sorted({box for rank in ranks for box in wanted[rank]}):
        result += uncovered([box], result)
    return result


def _size(boxes: Iterable[Box]) -> int:
    return sum(math.prod(box.shape) for box in boxes)


def _routes(
    reading: _Reading,
    wanted: Sequence[dict[int, set[Box]]],
    keys: Sequence[Key],
    itemsizes: Sequence[int],
) -> tuple[list[Transfer], list[Transfer]]:
    """Transfers between nodes, then within them."""
    nodes, index = reading.nodes, {key: tensor for tensor, key in enumerate(keys)}
    held = [Held(index[copy.key], rank, copy.part.box) for copy, rank in reading.readers.items()]
    entering = _entering(held, wanted, nodes, itemsizes)
    across = [t for round_ in route(held, entering, itemsizes) for t in round_]
    held += [Held(w.tensor, w.rank, w.box) for w in entering]
    everything = [
        Wanted(tensor, rank, box)
        for tensor, by_rank in enumerate(wanted)
        for rank, boxes in by_rank.items()
        for box in sorted(boxes)
    ]

    def prefer_own_node(source: int, destination: int) -> float:
        return 2.0 if nodes[source] == nodes[destination] else 1.0

    rounds = route(held, everything, itemsizes, prefer_own_node)
    return across, [t for round_ in rounds for t in round_]


def _entering(
    held: Sequence[Held],
    wanted: Sequence[dict[int, set[Box]]],
    nodes: Sequence[str],
    itemsizes: Sequence[int],
) -> list[Wanted]:
    """What nodes lack, each slice by one of the node's ranks that want it."""
    there: dict[tuple[str, int], list[Box]] = defaultdict(list)
    for one in held:
        there[nodes[one.rank], one.tensor].append(one.box)
    load_bytes: Counter[int] = Counter()
    result = []
    for tensor, by_rank in enumerate(wanted):
        who: dict[tuple[str, Box], list[int]] = defaultdict(list)
        for rank, boxes in by_rank.items():
            for box in boxes:
                who[nodes[rank], box].append(rank)
        for (node, box), ranks in sorted(who.items(), key=lambda item: (item[0][0], item[0][1])):
            for piece in uncovered([box], there[node, tensor]):
                rank = min(ranks, key=lambda rank: (load_bytes[rank], rank))
                load_bytes[rank] += _size([piece]) * itemsizes[tensor]
                there[node, tensor].append(piece)
                result.append(Wanted(tensor, rank, piece))
    return result
