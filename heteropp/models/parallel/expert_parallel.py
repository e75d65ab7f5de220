"""Expert parallelism: the experts of a layer spread over ranks that have rows of their own.

Each rank has some experts whole, as many as its share says, and sends the rows that its tokens
route elsewhere to the ranks that hold their experts. One all-to-all of uneven parts takes rows
there, another one takes back what the experts made of them; the backward takes gradients the same
ways. No row is dropped: how many come is what the routers say, and if that is more than a plan has
room for, the step ends with a sentence on all of these ranks, before memory runs out. As everything
else, these messages are part of a backward's first half.

Ranks compute what needs no rows while these are on their way. While what experts made of them comes
back, that is the layer's shared experts, if it has some; while the gradients of that go there, the
shared experts' backward; and while the gradients of rows come back, those of the experts' weights,
unless they are put off, as what a stage sends to another one comes first. Nothing is left for when
rows go to experts: attention comes before them, and all else of the layer behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.models.parallel.backward import WeightGradients
from heteropp.models.spec import ModelError
from heteropp.process_groups.collective import all_gather, all_to_all

Counts = Sequence[Sequence[int]]  # by rank and expert: the rows that the rank routes to it


class ExpertCapacityError(ModelError):
    """Routers give experts more rows than their rank has room for; the message is one sentence."""


@dataclass(frozen=True)
class UnderWay:
    """Rows between ranks: until `wait` returns `sent` is not to be written, nor `coming` read."""

    sent: Tensor
    coming: Tensor
    wait: Callable[[], Any]


class ExpertParallelGroup(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """The experts [first, last) of a layer that each of its ranks holds."""

    def counts(self, chosen: Tensor, experts: int, layer: int) -> Counts:
        """Tells all ranks how many rows go where; chosen: the expert of each of this rank's.

        Raises ExpertCapacityError, on all ranks, where one of them has no room for its rows.
        """

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends rows, so many to each rank in turn, and returns those that come, in their order."""

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> UnderWay:
        """Does so without waiting for any."""


class ExpertProcessGroup:
    """Ranks over which experts lie, over torch.distributed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parts: Mapping[int, tuple[int, int]],
        capacity: float | None = None,
    ) -> None:
        """parts: by rank of the plan. capacity: how many times the even number of rows each takes
        at most; None: as many as come.
        """
        self.group, self.index = group, group.rank()
        self.capacity = None if capacity is None else Fraction(str(capacity))  # exact, as in plans
        self.ranks, self.parts = tuple(parts), tuple(parts.values())

    def counts(self, chosen: Tensor, experts: int, layer: int) -> Counts:
        own = torch.bincount(chosen, minlength=experts)
        every = own.new_empty(len(self.parts) * experts)
        all_gather(every, own, self.group)
        result: Counts = every.view(-1, experts).tolist()
        if self.capacity is not None:
            self._check(result, layer, self.capacity)
        return result

    def _check(self, counts: Counts, layer: int, capacity: Fraction) -> None:
        total, experts = sum(map(sum, counts)), len(counts[0])
        for rank, (first, last) in zip(self.ranks, self.parts, strict=True):
            rows = sum(sum(of_rank[first:last]) for of_rank in counts)
            most = int(capacity * total * (last - first) / experts)
            if rows > most:
                raise ExpertCapacityError(
                    f"the routers of layer {layer} send {rows} rows of a micro-batch to the "
                    f"experts of rank {rank}, which have room for {most}: {float(capacity):g} "
                    f"times their part of {total}, as expert_capacity of the plan's stage says"
                )

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        result = rows.new_empty(sum(received), *rows.shape[1:])
        all_to_all(result, rows.contiguous(), received, sent, self.group)
        return result

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> UnderWay:
        rows, coming = rows.contiguous(), rows.new_empty(sum(received), *rows.shape[1:])
        work = all_to_all(coming, rows, received, sent, self.group, wait=False)
        assert work is not None
        return UnderWay(rows, coming, work.wait)


def by_rank(chosen: Tensor, group: ExpertParallelGroup) -> Tensor:
    """Returns the experts of rows by other numbers, of which those that a rank holds follow on
    those of the rank before: a stage's replicas need not have experts in the order of their ranks.
    """
    if list(group.parts) == sorted(group.parts):
        return chosen
    experts = [expert for first, last in group.parts for expert in range(first, last)]
    numbers = torch.tensor(experts, device="cpu").argsort()
    return numbers.to(chosen.device).index_select(0, chosen)


@dataclass(frozen=True)
class Routes:
    """Where the rows of one layer go, and how those that come are told apart."""

    group: ExpertParallelGroup
    counts: Counts

    @cached_property
    def sent(self) -> list[int]:
        """The rows that go to each rank: they stand by rank, and then by expert."""
        own = self.counts[self.group.index]
        return [sum(own[first:last]) for first, last in self.group.parts]

    @cached_property
    def _coming(self) -> list[Sequence[int]]:
        """The rows that come, by rank and expert of this rank."""
        first, last = self.group.parts[self.group.index]
        return [of_rank[first:last] for of_rank in self.counts]

    @cached_property
    def received(self) -> list[int]:
        """The rows that come from each rank."""
        return [sum(rows) for rows in self._coming]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where the rows of each of this rank's experts end, from 0 on, once they are by expert."""
        return (0, *accumulate(map(sum, zip(*self._coming, strict=True))))

    def by_expert(self, device: torch.device) -> Tensor:
        """Returns which of the rows that came stands where, so that one expert's are together."""
        coming = torch.tensor(self._coming, dtype=torch.int64, device="cpu")  # [ranks, experts]
        expert = torch.arange(coming.shape[1], device="cpu").expand_as(coming).flatten()
        rows = expert.repeat_interleave(coming.flatten())  # the expert of each that came
        return rows.argsort(stable=True).to(device)


def dispatched(x: Tensor, routes: Routes) -> tuple[Tensor, WeightGradients | None]:
    """Returns the rows of this rank's experts, [received, ..]; x: its own, by rank and expert.

    What is second has to be given the gradients of the experts' weights, which the backward then
    computes while those of x are on their way; None: x needs none.
    """
    later = WeightGradients()
    rows: Tensor = _Dispatched.apply(x, routes, later)
    return rows, later if rows.requires_grad else None


def returned(x: Tensor, routes: Routes, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """Returns what experts made of this rank's own rows; x: of the rows that came to it.

    meanwhile: what is computed while rows are on their way, and its backward while gradients are.
    """
    back = _Return(routes)
    coming: Tensor = _Leave.apply(x, back)
    if meanwhile is not None:
        meanwhile()
    rows: Tensor = _Arrive.apply(coming, back)
    return rows


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes, later: WeightGradients) -> Tensor:
        ctx.routes, ctx.later = routes, later
        return routes.group.all_to_all(x, routes.sent, routes.received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        routes: Routes = ctx.routes
        under_way = routes.group.start(gradient, routes.received, routes.sent)
        ctx.later.run()
        under_way.wait()
        return under_way.coming, None, None


class _Return:
    """The way back, in two: what autograd runs between them is computed while rows travel.

    It runs a backward's nodes in the reverse order of their forward's, so that gradients leave in
    that of _Arrive, and are waited for in that of _Leave.
    """

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.under_way: UnderWay | None = None

    def leave(self, rows: Tensor) -> Tensor:
        """Returns the rows that come, which are not there yet."""
        routes = self.routes
        self.under_way = routes.group.start(rows, routes.received, routes.sent)
        return self.under_way.coming

    def leave_back(self, gradient: Tensor) -> None:
        routes = self.routes
        self.under_way = routes.group.start(gradient, routes.sent, routes.received)

    def arrive(self) -> Tensor:
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        under_way.wait()
        return under_way.coming


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, back: _Return) -> Tensor:
        ctx.back = back
        return back.leave(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.back.arrive(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, back: _Return) -> Tensor:
        ctx.back = back
        return back.arrive().view_as(coming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.back.leave_back(gradient)
        return gradient, None  # in the place of what is under way
