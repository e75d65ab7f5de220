"""Who reads which copy, and who passes what on to whom: decided before anything is read.

A tensor is read from the nearest tier that has it: the node's own memory, its disk, another node's
memory or disk, the remote store. Nothing is read twice where once will do: a rank reads for all of
its node, and of the remote store a tensor is fetched once for the whole job. What a node lacks
comes over the network once, to one of its ranks that want it, and from there to the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from heteropp.layout.boxes import Box, uncovered
from heteropp.layout.hspmd.routing import HeldBox, Transfer, Wanted, route
from heteropp.state.recovery.bundles import Bundle, Lot, Want, bundles
from heteropp.state.recovery.manifest import TierKind
from heteropp.state.recovery.sources import NEARNESS, StoredTensor
from heteropp.state.slices.parameter_slice import block_of

SourceKind = Literal["memory", "disk", "peer", "remote"]


@dataclass(frozen=True, order=True)
class ReceivedState:
    """State that came to a node from one place; its ranks share it."""

    to: str  # node
    source: SourceKind
    origin: str  # the node, or another one; "" for the remote store
    block: str
    bytes: int


@dataclass(frozen=True)
class RecoveryShare:
    """What one rank reads, and the transfers that it takes part in."""

    reads: tuple[tuple[StoredTensor, ...], ...]  # one tuple for each lot
    bundles: dict[int, Bundle]  # the transfers' tensors
    # by block, in the same order on all ranks: first between nodes, then between a node's ranks
    across: dict[str, tuple[Transfer, ...]]
    within: dict[str, tuple[Transfer, ...]]

    def each_read(self) -> list[StoredTensor]:
        return [copy for lot in self.reads for copy in lot]


@dataclass(frozen=True)
class Assignment:
    bundles: list[Bundle]  # the transfers' tensors
    reads: dict[int, list[tuple[StoredTensor, ...]]]  # by rank
    across: list[Transfer]
    within: list[Transfer]
    moved: list[ReceivedState]

    def shares(self, ranks: int) -> list[RecoveryShare]:
        """Returns the share of each rank, in the order of ranks."""
        across, within = (self._by_rank(transfers) for transfers in (self.across, self.within))
        shares = []
        for rank in range(ranks):
            used = {t.tensor for some in (across, within) for ts in some[rank].values() for t in ts}
            shares.append(
                RecoveryShare(
                    tuple(self.reads.get(rank, ())),
                    {tensor: self.bundles[tensor] for tensor in sorted(used)},
                    {block: tuple(some) for block, some in across[rank].items()},
                    {block: tuple(some) for block, some in within[rank].items()},
                )
            )
        return shares

    def _by_rank(self, transfers: Iterable[Transfer]) -> dict[int, dict[str, list[Transfer]]]:
        """Returns the transfers that each rank sends or receives, by rank and block."""
        result: dict[int, dict[str, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
        for transfer in transfers:
            block = block_of(self.bundles[transfer.tensor].name)
            for rank in {*transfer.senders, transfer.receiver}:
                result[rank][block].append(transfer)
        return result


def assign(
    copies: Sequence[StoredTensor], wants: Sequence[Collection[Want]], nodes: Sequence[str]
) -> Assignment:
    """Decides which rank reads which copy, and who passes it on to whom.

    The copies are of one step and cover what is wanted. wants and nodes: by rank.
    """
    together = bundles(copies, wants)
    reading = _Reading(nodes)
    for each in together:
        reading.choose(each.bundle, list(each.lots), each.wanted)
    across, within = _routes(
        reading, [each.bundle for each in together], [each.wanted for each in together]
    )
    for transfer in across:
        sender, receiver = nodes[transfer.senders[0]], nodes[transfer.receiver]
        block = block_of(together[transfer.tensor].bundle.name)
        reading.moved[receiver, "peer", sender, block] += transfer.size_bytes
    reads: dict[int, list[tuple[StoredTensor, ...]]] = defaultdict(list)
    for each, readers in zip(together, reading.readers, strict=True):
        for lot, rank in readers.items():
            reads[rank].append(each.lots[lot])
    moved = [ReceivedState(*place, size) for place, size in sorted(reading.moved.items())]
    return Assignment([each.bundle for each in together], reads, across, within, moved)


class _Reading:
    """Chooses lots and readers, bundle after bundle, so that tiers' loads are spread over ranks."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.ranks: dict[str, list[int]] = defaultdict(list)
        for rank, node in enumerate(nodes):
            self.ranks[node].append(rank)
        self.readers: list[dict[Lot, int]] = []  # by bundle
        self.load_bytes: Counter[tuple[TierKind, int]] = Counter()  # by tier and rank
        self.moved: Counter[tuple[str, SourceKind, str, str]] = Counter()

    def choose(self, bundle: Bundle, lots: list[Lot], wanted: dict[int, set[Box]]) -> None:
        """Chooses which lots of a bundle are read, and by whom. wanted: boxes by rank."""
        self.bundle, self.block = bundle, block_of(bundle.name)
        self.readers.append({})
        lots.sort(key=_order)
        lacking: dict[str, list[Box]] = {}
        for node in self.ranks:
            if ranks := [rank for rank in self.ranks[node] if rank in wanted]:
                own = [lot for lot in lots if lot.node == node]
                lacking[node] = self._own(node, own, _union(wanted, ranks), ranks)
        for node, boxes in lacking.items():
            if boxes:
                others = [lot for lot in lots if lot.node in self.ranks and lot.node != node]
                lacking[node] = self._peers(others, boxes)
        lacking = {node: boxes for node, boxes in lacking.items() if boxes}
        self._remote([lot for lot in lots if lot.tier == "remote"], lacking, wanted)

    def _own(
        self, node: str, lots: Sequence[Lot], lacking: list[Box], ranks: Sequence[int]
    ) -> list[Box]:
        for lot in lots:
            rest = uncovered(lacking, [lot.box])
            if rest != lacking:
                self._read(lot, ranks)
                kind: SourceKind = "memory" if lot.tier == "memory" else "disk"
                size_bytes = self.bundle.bytes_of(lacking) - self.bundle.bytes_of(rest)
                self.moved[node, kind, node, self.block] += size_bytes
                lacking = rest
        return lacking

    def _peers(self, lots: Sequence[Lot], lacking: list[Box]) -> list[Box]:
        """Has other nodes read what a node lacks; returns the boxes that they have not either.

        Lots that are read anyway come first, then memory before disk, and of equal tiers the node
        that has read least.
        """
        left, readers = list(lots), self.readers[-1]
        while left and lacking:
            lot = min(left, key=lambda one: (one not in readers, *self._far(one)))
            left.remove(lot)
            rest = uncovered(lacking, [lot.box])
            if rest != lacking:
                self._read(lot, self.ranks[lot.node])
                lacking = rest
        return lacking

    def _far(self, lot: Lot) -> tuple:
        return NEARNESS[lot.tier], self._node_load_bytes(lot.tier, lot.node), _order(lot)

    def _remote(
        self, lots: Sequence[Lot], lacking: dict[str, list[Box]], wanted: dict[int, set[Box]]
    ) -> None:
        """Has each lot fetched by the node that has fetched least, of those that lack it."""
        for lot in lots if lacking else ():
            lack = [n for n, boxes in lacking.items() if uncovered(boxes, [lot.box]) != boxes]
            if not lack:
                continue
            node = min(lack, key=lambda n: (self._node_load_bytes("remote", n), n))
            self._read(lot, [rank for rank in self.ranks[node] if rank in wanted])
            self.moved[node, "remote", "", self.block] += self.bundle.bytes_of([lot.box])
            for n in lack:
                lacking[n] = uncovered(lacking[n], [lot.box])

    def _read(self, lot: Lot, ranks: Sequence[int]) -> None:
        if lot not in self.readers[-1]:
            rank = min(ranks, key=lambda rank: (self.load_bytes[lot.tier, rank], rank))
            self.readers[-1][lot] = rank
            self.load_bytes[lot.tier, rank] += self.bundle.bytes_of([lot.box])

    def _node_load_bytes(self, tier: TierKind, node: str) -> int:
        return sum(self.load_bytes[tier, rank] for rank in self.ranks[node])


def _order(lot: Lot) -> tuple:
    """Returns a sort key: nearer tiers first, then larger boxes, as one may replace many."""
    return NEARNESS[lot.tier], -lot.elements, lot.box.ranges, lot.node, lot.file


def _union(wanted: dict[int, set[Box]], ranks: Sequence[int]) -> list[Box]:
    """Returns boxes without overlap that hold all that the given ranks want."""
    result: list[Box] = []
    for box in sorted({box for rank in ranks for box in wanted[rank]}):
        result += uncovered([box], result)
    return result


def _routes(
    reading: _Reading, tensors: Sequence[Bundle], wanted: Sequence[dict[int, set[Box]]]
) -> tuple[list[Transfer], list[Transfer]]:
    """Returns the transfers between nodes, and those within nodes that follow."""
    nodes = reading.nodes
    itemsizes = [bundle.itemsize for bundle in tensors]
    held = [
        HeldBox(tensor, rank, tensors[tensor].box(lot.box))
        for tensor, readers in enumerate(reading.readers)
        for lot, rank in readers.items()
    ]
    everything = [
        Wanted(tensor, rank, tensors[tensor].box(box))
        for tensor, by_rank in enumerate(wanted)
        for rank, boxes in by_rank.items()
        for box in sorted(boxes)
    ]
    entering = _entering(held, everything, nodes, itemsizes)
    across = [t for round_ in route(held, entering, itemsizes) for t in round_]
    held += [HeldBox(w.tensor, w.rank, w.box) for w in entering]

    def prefer_own_node(source: int, destination: int) -> float:
        return 2.0 if nodes[source] == nodes[destination] else 1.0

    rounds = route(held, everything, itemsizes, prefer_own_node)
    return across, [t for round_ in rounds for t in round_]


def _entering(
    held: Sequence[HeldBox],
    wanted: Sequence[Wanted],
    nodes: Sequence[str],
    itemsizes: Sequence[int],
) -> list[Wanted]:
    """Returns what nodes lack: each slice is received by one of the node's ranks that want it."""
    there: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for one in held:
        there[one.tensor, nodes[one.rank]].append(one.box)
    who: dict[tuple[int, str, Box], list[int]] = defaultdict(list)
    for each in wanted:
        who[each.tensor, nodes[each.rank], each.box].append(each.rank)
    load_bytes: Counter[int] = Counter()
    result = []
    for (tensor, node, box), ranks in who.items():
        for piece in uncovered([box], there[tensor, node]):
            rank = min(ranks, key=lambda rank: (load_bytes[rank], rank))
            load_bytes[rank] += piece.size * itemsizes[tensor]
            there[tensor, node].append(piece)
            result.append(Wanted(tensor, rank, piece))
    return result
