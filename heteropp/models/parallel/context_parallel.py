"""Context parallelism: the tokens of every sequence cut over ranks, which all hold the same slices.

Each rank takes contiguous tokens, so that positions stay plain ranges, and parts may be unequal, so
that later ones, whose tokens see more keys, are shorter. All that treats a token by itself runs on
a rank's own tokens. Attention alone needs others: keys and values of tokens before. As it is
causal, only later ranks need them, and each is sent them by their owner; what their gradients come
to is sent back, and summed in the order of the ranks. These messages are part of a backward's first
half, never of the weight gradients that may wait.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
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

    @abstractmethod
    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends contiguous tensors to other ranks of the group, and fills those that come."""


class ContextProcessGroup(ContextParallelGroup):
    """The ranks that share a replica's sequences, over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, parts: tuple[tuple[int, int], ...]) -> None:
        self.group, self.parts, self.index = group, parts, group.rank()
        self.ranks = dist.get_process_group_ranks(group)

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        works = [
            *(dist.irecv(t, self.ranks[peer], self.group) for peer, t in received.items()),
            *(dist.isend(t, self.ranks[peer], self.group) for peer, t in sent.items()),
        ]
        for work in works:
            assert work is not None
            work.wait()


class _WithEarlierTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextParallelGroup) -> Tensor:
        ctx.group = group
        sequences, _, *rest = x.shape
        x = x.contiguous()
        earlier = {
            rank: x.new_empty(sequences, last - first, *rest)
            for rank, (first, last) in enumerate(group.parts[: group.index])
        }
        later = range(group.index + 1, len(group.parts))
        group.exchange(dict.fromkeys(later, x), earlier)
        return torch.cat([*earlier.values(), x], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        group: ContextParallelGroup = ctx.group
        *earlier, (first, last) = group.parts[: group.index + 1]
        own = gradient[:, first:last]
        sent = {rank: gradient[:, a:b].contiguous() for rank, (a, b) in enumerate(earlier)}
        received = {
            rank: own.new_empty(own.shape) for rank in range(group.index + 1, len(group.parts))
        }
        group.exchange(sent, received)
        for other in received.values():
            own = own + other
        return own, None
