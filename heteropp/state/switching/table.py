"""What moves of a model's state when another plan follows.

All parameters and all of the optimizer's state are routed in one table, so that loads are balanced
over the whole switch (Hetu v2, section 6.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from heteropp.description.plan import Plan
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
from heteropp.state.slices.holdings import holdings
from heteropp.state.slices.quantities import Quantity, QuantityName, quantities_of


@dataclass(frozen=True)
class Table:
    """Who sends what to whom, by ranks of the world that both plans' ranks are members of."""

    quantities: tuple[Quantity, ...]
    # by parameter and quantity, the transfers' number
    tensors: Mapping[tuple[str, QuantityName], int]
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
    quantities = tuple(quantities or quantities_of(old.model))
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


def _alike(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether both have the same parameters; their sequences may be of unlike lengths."""

    def shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
        return [(model.global_name(p.name), p.shape) for p in model.parameters()]

    return one.dtype == other.dtype and shapes(one) == shapes(other)
