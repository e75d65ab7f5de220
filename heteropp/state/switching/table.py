"""What a plan's ranks hold of a model's state, and what moves when another plan follows.

All parameters and all of the optimizer's state are routed in one table, so that loads are balanced
over the whole switch (Hetu v2, section 6.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from heteropp.description.plan import Plan, ministage_layers
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import Layout, layout
from heteropp.layout.hspmd.routing import (
    BytesPerS,
    HeldBox,
    Link,
    Round,
    Wanted,
    alike,
    route,
    volume_bytes,
)
from heteropp.models.spec import ModelSpec


@dataclass(frozen=True)
class Quantity:
    """Something that is held of every element of a model, each rank's in a flat buffer."""

    name: str
    dtype: str
    whole: bool  # of all parameters of a ministage; otherwise of the rank's shard of them

    @property
    def itemsize(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)


def state(model: ModelSpec) -> tuple[Quantity, ...]:
    """Returns the quantities that training goes on from.

    A model of 16 bits also has a wide value (master copy) of every parameter.
    """
    values = [Quantity("parameter", model.dtype, whole=True)]
    if model.dtype != model.wide_dtype:
        values.append(Quantity("value", model.wide_dtype, whole=False))
    averages = (
        Quantity(name, model.wide_dtype, whole=False) for name in ("average", "average_square")
    )
    return (*values, *averages)


@dataclass(frozen=True)
class BufferSlice:
    """A slice that a rank holds, elements [first, last) of a buffer."""

    ministage: int
    quantity: Quantity
    name: str  # of the parameter, global
    box: Box
    first: int
    last: int


@dataclass(frozen=True)
class Table:
    """Who sends what to whom, by ranks of the world that both plans' ranks are members of."""

    quantities: tuple[Quantity, ...]
    tensors: Mapping[tuple[str, str], int]  # by parameter and quantity, the transfers' number
    rounds: Sequence[Round]

    @cached_property
    def volume_bytes(self) -> dict[Link, int]:
        """The bytes that pass each link."""
        return volume_bytes(self.rounds)

    @property
    def sent_bytes(self) -> Counter[int]:
        """The bytes that each rank sends to others; ranks that send nothing are left out."""
        sent: Counter[int] = Counter()
        for (sender, _), size_bytes in self.volume_bytes.items():
            sent[sender] += size_bytes
        return sent

    @property
    def stayed_bytes(self) -> Counter[int]:
        """The bytes that each rank wants and already had under the old plan."""
        stayed: Counter[int] = Counter()
        for transfer in (transfer for round_ in self.rounds for transfer in round_):
            if transfer.senders == (transfer.receiver,):
                stayed[transfer.receiver] += transfer.size_bytes
        return stayed


def table(
    old: Plan,
    new: Plan,
    old_ranks: Sequence[int],
    new_ranks: Sequence[int],
    bytes_per_s: BytesPerS = alike,
    quantities: Sequence[Quantity] | None = None,
) -> Table:
    """Returns what moves from the old plan's ranks to the new plan's.

    old_ranks and new_ranks: by rank of the plan, its rank in the world that moves the state.
    quantities: those of the whole state if None. Raises ValueError for plans of unlike models.
    """
    if not _alike(old.model, new.model):
        raise ValueError(f"plans of unlike models, {old.model.name} and {new.model.name}")
    quantities = tuple(quantities or state(old.model))
    names = dict.fromkeys(old.model.global_name(p.name) for p in old.model.parameters())
    pairs = [(name, quantity) for name in names for quantity in quantities]
    tensors = {(name, quantity.name): i for i, (name, quantity) in enumerate(pairs)}
    held = [
        HeldBox(tensors[h.name, h.quantity.name], place, h.box)
        for rank, place in enumerate(old_ranks)
        for h in holdings(old, rank, quantities)
    ]
    wanted = [
        Wanted(tensors[h.name, h.quantity.name], place, h.box)
        for rank, place in enumerate(new_ranks)
        for h in holdings(new, rank, quantities)
    ]
    itemsizes = [quantity.itemsize for _, quantity in pairs]
    return Table(quantities, tensors, route(held, wanted, itemsizes, bytes_per_s, divide=True))


def holdings(plan: Plan, rank: int, quantities: Sequence[Quantity]) -> Iterator[BufferSlice]:
    """Yields what a rank holds between two steps.

    A parameter may stand in two of its ministages.
    """
    for k, (whole, shard) in enumerate(layouts(plan, rank)):
        boxes = whole.boxes()
        pieces, start = whole.pieces(shard), whole.shard(shard).start
        for quantity in quantities:
            offset = 0 if quantity.whole else start
            for piece in boxes if quantity.whole else pieces:
                first, last = piece.first - offset, piece.last - offset
                yield BufferSlice(k, quantity, piece.name, piece.box, first, last)


def layouts(plan: Plan, rank: int) -> list[tuple[Layout, int]]:
    """Returns, for each ministage, its flat buffers' layout and the shard that the rank keeps."""
    p, s, _, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    shards = stage.dp if plan.zero_stage else 1
    turn = stage.peers(tp_index).index(rank)
    return [
        (layout(plan.model, layers, stage.tp, tp_index, shards), turn % shards)
        for layers in ministage_layers(plan.pipelines[p], plan.schedule)[s]
    ]


def buffer_sizes(
    plan: Plan, rank: int, quantities: Sequence[Quantity]
) -> dict[tuple[int, str], int]:
    """Returns the number of elements of a rank's buffers, by ministage and quantity."""
    return {
        (k, quantity.name): whole.size if quantity.whole else whole.size // whole.shards
        for k, (whole, _) in enumerate(layouts(plan, rank))
        for quantity in quantities
    }


def state_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of all the state that a rank holds."""
    quantities = state(plan.model)
    itemsizes = {quantity.name: quantity.itemsize for quantity in quantities}
    sizes = buffer_sizes(plan, rank, quantities)
    return sum(size * itemsizes[name] for (_, name), size in sizes.items())


def _alike(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether both have the same parameters; their sequences may be of unlike lengths."""

    def shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
        return [(model.global_name(p.name), p.shape) for p in model.parameters()]

    return one.dtype == other.dtype and shapes(one) == shapes(other)
