"""The backward in two halves: the gradient of the input first, those of the weights later.

A stage sends the gradient of its input as soon as it has it, and what the weights need may wait
until there is nothing better to do (Zero Bubble Pipeline Parallelism, section 3). Only the products
that give the gradients of weight matrices are put off; they are almost all of that half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

Product = Callable[[Tensor, Tensor], Tensor]  # of a result's gradient and the input


class WeightGradients:
    """The second half of one backward: what each use of a weight needs for its gradient."""

    def __init__(self) -> None:
        self.uses: list[tuple[Tensor, Tensor, Tensor, Product]] = []

    def backward(self, output: Tensor | GradientEdge, gradient: Tensor | None) -> None:
        """Runs the first half of the backward of a forward that was run inside `put_off`.

        A part of it that torch.utils.checkpoint runs again here has its gradients put off, too.
        """
        with _putting_off(self):
            backward(output, gradient)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a gradient, or a view of it, is held, and nothing may be added to it in place."""
        return any(same_storage(gradient, tensor) for _, gradient, _, _ in self.uses)

    def bytes(self) -> int:
        """Returns the bytes of all tensors held until `run`; shared storage counts once."""
        storages = {t.untyped_storage()._cdata: t for _, *both, _ in self.uses for t in both}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def run(self) -> None:
        """Adds to the weights' gradients, bit for bit what the whole backward would have added."""
        while self.uses:
            # the newest first: a cache may still hold it
            weight, gradient, x, product_of = self.uses.pop()
            with torch.enable_grad():  # also inside a backward
                use = _PutOff.apply(weight, gradient, x, product_of)
            torch.autograd.backward(use, use.detach())


class _PutOff(torch.autograd.Function):
    """A use of a weight whose backward is the product: autograd takes that over as it is, where a
    gradient from outside is copied. What it returns, and its gradient, are never read.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor, x: Tensor, product: Product) -> Tensor:
        ctx.gradient, ctx.x, ctx.product = gradient, x, product
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.product(ctx.gradient, ctx.x), None, None, None


def backward(output: Tensor | GradientEdge, gradient: Tensor | None) -> None:
    """Runs a whole backward; there is none of a first stage in which nothing trains."""
    if not isinstance(output, Tensor) or output.requires_grad:
        torch.autograd.backward(output, gradient)


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


def _product(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.t() @ x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)  # a frozen weight needs none
        # itself: a saved tensor would come back as another where hooks look on
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight = ctx.saved_tensors, ctx.weight
        if ctx.needs_input_grad[1]:
            ctx.later.uses.append((weight, gradient, x.detach(), _product))  # not its graph
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_input, None, gradient.sum(0) if ctx.needs_input_grad[2] else None, None


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: tuple[int, ...],
    transposed: bool = False,
    later: WeightGradients | None = None,
) -> Tensor:
    """Returns groups of rows, each multiplied by a matrix of its own, [rows, out].

    x: [rows, in]; weight: [groups, out, in], or [groups, in, out] if transposed; bias: [groups,
    out]. Group i is rows [ends[i], ends[i + 1]). Inside `put_off` the backward puts off the
    weight's gradient; a backward that is not cut leaves it to `later`, which is to run in it.
    """
    result: Tensor = _GroupedLinear.apply(x, weight, bias, ends, transposed, _later or later)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: tuple[int, ...],
        transposed: bool,
        later: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight, ctx.ends, ctx.transposed, ctx.later = weight, ends, transposed, later
        result = x.new_empty(len(x), weight.shape[2 if transposed else 1])
        for i, rows in _groups(ends):
            matrix = weight[i] if transposed else weight[i].t()
            if bias is None:
                torch.mm(x[rows], matrix, out=result[rows])
            else:
                torch.addmm(bias[i], x[rows], matrix, out=result[rows])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight, ends = ctx.saved_tensors, ctx.weight, ctx.ends
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            inputs = weight.shape[1 if ctx.transposed else 2]
            of_input = gradient.new_empty(len(gradient), inputs)
            for i, rows in _groups(ends):
                matrix = weight[i].t() if ctx.transposed else weight[i]
                torch.mm(gradient[rows], matrix, out=of_input[rows])

        def product_of(gradient: Tensor, x: Tensor) -> Tensor:
            left, right = (x, gradient) if ctx.transposed else (gradient, x)
            product = torch.empty_like(weight)
            for i, rows in _groups(ends, with_empty=True):
                torch.mm(left[rows].t(), right[rows], out=product[i])
            return product

        if ctx.needs_input_grad[1]:
            if ctx.later is None:
                of_weight = product_of(gradient, x)
            else:
                ctx.later.uses.append((weight, gradient, x.detach(), product_of))
        if ctx.needs_input_grad[2]:
            of_bias = gradient.new_zeros(len(ends) - 1, gradient.shape[1])
            for i, rows in _groups(ends):
                torch.sum(gradient[rows], 0, out=of_bias[i])
        return of_input, of_weight, of_bias, None, None, None


def _groups(ends: tuple[int, ...], with_empty: bool = False) -> Iterator[tuple[int, slice]]:
    for i, (first, last) in enumerate(pairwise(ends)):
        if last > first or with_empty:
            yield i, slice(first, last)
