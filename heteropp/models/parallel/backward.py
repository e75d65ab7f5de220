"""The backward in two halves: the gradient of the input first, those of the weights later.

A stage sends the gradient of its input as soon as it has it, and what the weights need may wait
until there is nothing better to do (Zero Bubble Pipeline Parallelism, section 3). Only the products
that give the gradients of weight matrices are put off; they are almost all of that half.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge


class WeightGradients:
    """The second half of one backward: what each use of a weight needs for its gradient."""

    def __init__(self) -> None:
        self.uses: list[tuple[Tensor, Tensor, Tensor]] = []

    def backward(self, output: Tensor | GradientEdge, gradient: Tensor | None) -> None:
        """Runs the first half of the backward of a forward that was run inside `put_off`.

        A part of it that torch.utils.checkpoint runs again here has its gradients put off, too.
        """
        with _putting_off(self):
            torch.autograd.backward(output, gradient)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a gradient, or a view of it, is held, and nothing may be added to it in place."""
        return any(same_storage(gradient, tensor) for _, gradient, _ in self.uses)

    def bytes(self) -> int:
        """Returns the bytes of all tensors held until `run`; shared storage counts once."""
        storages = {t.untyped_storage()._cdata: t for _, *both in self.uses for t in both}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def run(self) -> None:
        """Adds to the weights' gradients, bit for bit what the whole backward would have added."""
        while self.uses:
            weight, gradient, x = self.uses.pop()  # the newest first: a cache may still hold it
            product = gradient.t() @ x
            if weight.grad is None:  # hooks sum it elsewhere
                torch.autograd.backward(weight, product)
            else:
                with torch.no_grad():
                    weight.grad.add_(product)


def same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


_later: WeightGradients | None = None  # of the forward or backward that is running


@contextmanager
def put_off() -> Iterator[WeightGradients]:
    """Puts off the weight gradients of a forward run inside.

    Its backward, run by what the context gives, leaves them to the same, whose `run` adds them.
    """
    later = WeightGradients()
    with _putting_off(later):
        yield later


@contextmanager
def _putting_off(later: WeightGradients) -> Iterator[None]:
    global _later
    _later = later
    try:
        yield
    finally:
        _later = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x, [rows, in], times the transposed weight, [out, in], plus the bias, [out].

    It is torch's linear; inside `put_off` its backward puts off the weight's gradient.
    """
    if _later is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, _later)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        # itself: a saved tensor would come back as another where hooks look on
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.later.uses.append((weight, gradient, x.detach()))  # not the graph behind it
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_input, None, gradient.sum(0) if ctx.needs_input_grad[2] else None, None
