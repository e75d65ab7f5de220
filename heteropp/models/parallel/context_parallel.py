"""Context parallelism: the tokens of every sequence cut over ranks, which all hold the same slices.

Each rank takes contiguous tokens, so that positions stay plain ranges, and parts may be unequal, so
that later ones, whose tokens see more keys, are shorter. All that treats a token by itself runs on
a rank's own tokens. Attention alone needs others: keys and values of tokens before. As it is
causal, only later ranks need them, and each is sent them by their owner; what their gradients come
to is sent back, and summed in the order of the ranks. Where a kernel tells the shares of both,
queries meet their own rank's keys while the others are on their way (heteropp.models.parallel.
context_attention). These messages are part of a backward's first half, never of the weight
gradients that may wait.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heteropp.models.parallel.token_context import TokenContext


class ContextParallelGroup(TokenContext):
    """The ranks that share a replica's sequences, of which this is one."""

    def with_earlier(self, x: Tensor, place: nn.Module) -> Tensor:
        found: Tensor = _WithEarlierTokens.apply(x, self)
        return found

    def send_on(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Sends what this rank has of its own tokens, [sequences, tokens, ..], to all later ranks.

        What is returned waits for that, and returns the same of each rank before.
        """
        sequences, _, *rest = x.shape
        x = x.contiguous()
        earlier = {
            rank: x.new_empty(sequences, last - first, *rest)
            for rank, (first, last) in enumerate(self.parts[: self.index])
        }
        later = range(self.index + 1, len(self.parts))
        return self._results(dict.fromkeys(later, x), earlier)

    def send_back(self, of_earlier: Tensor | None, own: Tensor) -> Callable[[], list[Tensor]]:
        """Sends gradients of all tokens before this rank's own to the ranks that have these.

        of_earlier: [sequences, tokens before, ..]; None: there are no such tokens. What is returned
        waits for that, and returns what each later rank has for this rank's own tokens, which are
        of the shape of `own`.
        """
        sent = {}
        if of_earlier is not None:
            earlier = enumerate(self.parts[: self.index])
            sent = {rank: of_earlier[:, a:b].contiguous() for rank, (a, b) in earlier}
        later = range(self.index + 1, len(self.parts))
        return self._results(sent, {rank: own.new_empty(own.shape) for rank in later})

    def _results(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> Callable[[], list[Tensor]]:
        wait, held = self.start(sent, received), [*sent.values()]

        def results() -> list[Tensor]:
            wait()
            held.clear()  # not before: it is on its way
            return [*received.values()]

        return results

    @abstractmethod
    def start(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Begins to send contiguous tensors to other ranks of the group, and to fill those that
        come. What is returned waits for both.
        """


class ContextProcessGroup(ContextParallelGroup):
    """The ranks that share a replica's sequences, over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, parts: tuple[tuple[int, int], ...]) -> None:
        self.group, self.parts, self.index = group, parts, group.rank()
        self.ranks = dist.get_process_group_ranks(group)

    def start(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        works = [
            *(dist.irecv(t, self.ranks[peer], self.group) for peer, t in received.items()),
            *(dist.isend(t, self.ranks[peer], self.group) for peer, t in sent.items()),
        ]

        def wait() -> None:
            for work in works:
                assert work is not None
                work.wait()

        return wait


class _WithEarlierTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextParallelGroup) -> Tensor:
        ctx.group = group
        return torch.cat([*group.send_on(x)(), x], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        group: ContextParallelGroup = ctx.group
        first, last = group.parts[group.index]
        own = gradient[:, first:last]
        for other in group.send_back(gradient[:, :first], own)():
            own = own + other
        return own, None
