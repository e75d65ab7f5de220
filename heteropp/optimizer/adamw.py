"""AdamW on a flat buffer, and clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heteropp.description.hyperparameters import Hyperparameters

HOST_PIECE = 1 << 17  # elements; what is computed in between then stays in a core's cache


class AdamW:
    """torch.optim.AdamW's arithmetic on one flat tensor, updated in place."""

    def __init__(
        self, values: Tensor, hyperparameters: Hyperparameters, decaying: int | None = None
    ) -> None:
        """decaying: how many elements at the begin have weight decay; None: all."""
        self.values = values
        self.decaying = len(values) if decaying is None else min(decaying, len(values))
        self.hyperparameters = hyperparameters
        self.average = torch.zeros_like(values)
        self.average_square = torch.zeros_like(values)
        self.steps = torch.tensor(0.0)  # on the host, where the bias correction is computed

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        decay = self.hyperparameters.weight_decay
        self._update(gradient, learning_rate, slice(0, self.decaying), decay)
        self._update(gradient, learning_rate, slice(self.decaying, None), 0.0)
        self.steps += 1

    def _update(
        self, gradient: Tensor, learning_rate: float, part: slice, weight_decay: float
    ) -> None:
        length = len(gradient[part])
        if not length:
            return
        size = HOST_PIECE if gradient.is_cpu else length
        values, gradients, averages, squares = (
            list(whole[part].split(size))
            for whole in (self.values, gradient, self.average, self.average_square)
        )
        # the function behind the class: the class would import torch's compiler, 1.5 s a rank
        adamw(
            values,
            gradients,
            averages,
            squares,
            [],
            [self.steps.clone() for _ in values],
            foreach=False,
            amsgrad=False,
            beta1=self.hyperparameters.beta1,
            beta2=self.hyperparameters.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.hyperparameters.epsilon,
            maximize=False,
        )


def clip(gradient: Tensor, total_norm: Tensor, largest: float) -> None:
    """Scales a gradient in place as torch.nn.utils.clip_grad_norm_ does; reads nothing back."""
    if largest:
        gradient.mul_(torch.clamp(largest / (total_norm + 1e-6), max=1.0))
