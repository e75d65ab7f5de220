"""AdamW on flat tensors, and clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heteropp.description.hyperparameters import Hyperparameters

HOST_PIECE = 1 << 17  # elements; what is computed in between then stays in a core's cache


def adamw_update(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: Tensor,
    learning_rate: float,
    hyperparameters: Hyperparameters,
) -> None:
    """torch.optim.AdamW's arithmetic but for weight decay, which comes first; in place.

    tensors: values, gradients, and the averages of gradients and of their squares, all flat and of
    one length. steps: those before, a scalar on the host.
    """
    length = len(tensors[0])
    size = HOST_PIECE if tensors[0].is_cpu else length
    values, gradients, averages, squares = (list(whole.split(size)) for whole in tensors)
    # the function behind the class: the class would import torch's compiler, 1.5 s a rank
    adamw(
        values,
        gradients,
        averages,
        squares,
        [],
        [steps.clone() for _ in values],
        foreach=False,
        amsgrad=False,
        beta1=hyperparameters.beta1,
        beta2=hyperparameters.beta2,
        lr=learning_rate,
        weight_decay=0.0,
        eps=hyperparameters.epsilon,
        maximize=False,
    )


def clip(gradient: Tensor, total_norm: Tensor, largest: float) -> None:
    """Scales a gradient in place as torch.nn.utils.clip_grad_norm_ does; reads nothing back."""
    if largest:
        gradient.mul_(torch.clamp(largest / (total_norm + 1e-6), max=1.0))
