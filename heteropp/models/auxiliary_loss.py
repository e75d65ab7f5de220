"""The loss that asks routers to load experts evenly (Switch Transformers, section 2.2).

Of a sequence it is the product, for each expert, of the part of choices that fell on it and of the
mean probability that routers gave it, over all tokens and all layers. As layers lie on many stages,
each adds to the totals of those before, and the last one tells all what the loss asks of
probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AuxiliaryLoss:
    """What a model's auxiliary loss depends on, besides what its routers did."""

    coefficient: float  # by which it counts beside the loss of tokens
    experts: int  # number of experts of a layer
    choices: int  # number of experts that a token goes to
    rows: int  # number of times that the whole model routes a token of one sequence

    def of(self, totals: Tensor) -> Tensor:
        """Returns the loss of each sequence, [sequences]; totals: those of all layers."""
        chosen, probability = (totals / self.rows).unbind(1)
        return self.coefficient * self.experts * (chosen * probability).sum(1)

    def gradients(self, totals: Tensor) -> Tensor:
        """Returns the gradients of `of` by any token's probabilities, [sequences, experts]."""
        return self.coefficient * self.experts / self.rows**2 * totals[:, 0]


class Routing:
    """What the routers of a ministage did with a micro-batch, and what is asked of them."""

    def __init__(
        self, loss: AuxiliaryLoss, sequences: int, part: float, like: Tensor, wide: torch.dtype
    ) -> None:
        """part: that of a gradient which is this rank's, where ranks with the same rows sum theirs;
        like: a tensor of the device; wide: the dtype of totals.
        """
        self.loss, self.sequences, self.part = loss, sequences, part
        # [sequences, 2, experts]: how often each was chosen, and the sum of its probabilities
        self.totals = like.new_zeros(sequences, 2, loss.experts, dtype=wide)
        self.counts = True  # whether this forward does; not one that is run again
        # [sequences, experts]: of the step's loss by the probabilities; there before the backward
        self.gradients: Tensor | None = None

    def passed(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Stands behind a router: returns the weights of chosen experts, [rows, choices], to whose
        backward the gradients are added that logits, [rows, experts], have of the loss.
        """
        probabilities = logits.to(self.totals.dtype).softmax(-1)
        if self.counts:
            self._count(probabilities.detach())
        result: Tensor = _WithGradients.apply(weights, probabilities, self)
        return result

    @torch.no_grad()
    def _count(self, probabilities: Tensor) -> None:
        chosen = probabilities.topk(self.loss.choices, -1).indices.view(self.sequences, -1)
        ones = torch.ones_like(chosen, dtype=self.totals.dtype)
        self.totals[:, 0].scatter_add_(1, chosen, ones)
        self.totals[:, 1] += probabilities.view(self.sequences, -1, self.loss.experts).sum(1)


class _WithGradients(torch.autograd.Function):
    """The weights forward; backward also gives probabilities what the loss asks of them."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, probabilities: Tensor, routing: Routing) -> Tensor:
        ctx.routing, ctx.rows = routing, len(probabilities)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        routing: Routing = ctx.routing
        asked = routing.gradients
        if asked is None:  # of a forward that is only traced or held against another
            asked = torch.zeros_like(routing.totals[:, 0])
        tokens = ctx.rows // routing.sequences
        return gradient, (asked * routing.part).repeat_interleave(tokens, 0), None
