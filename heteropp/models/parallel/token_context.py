"""Which tokens of every sequence a pass has, and where its attention finds those before them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class TokenContext(ABC):
    """One of the contiguous parts that sequences are cut into.

    All that treats a token by itself runs on the part's own tokens; attention asks for keys and
    values of those before.
    """

    index: int
    parts: tuple[tuple[int, int], ...]  # the tokens [first, last) of each part

    @abstractmethod
    def with_earlier(self, x: Tensor, place: nn.Module) -> Tensor:
        """Returns [sequences, last, ..]: the part's own tokens, and all before them.

        x: [sequences, own tokens, ..]; place: the attention that asks, the same one for every part.
        The backward sums each token's gradients where it belongs.
        """

    def keys_and_values(self, key: Tensor, value: Tensor, place: nn.Module) -> tuple[Tensor, ...]:
        """Returns both with those of all tokens before, [sequences, last, heads, size]."""
        both = self.with_earlier(torch.cat((key, value), -1), place)
        return both.split((key.shape[-1], value.shape[-1]), -1)


def own_part(context: TokenContext | None, length: int) -> tuple[int, int]:
    """Returns the tokens [first, last) of a sequence that a pass has; all without a context."""
    return (0, length) if context is None else context.parts[context.index]
