"""A tensor of which each rank holds its part, for programs written as for one device.

Operators deduce the annotations of their results (deduction.py, operators.py), and `communicate`
takes a tensor to another annotation; autograd runs both ways through them. Every rank runs the
whole program; where it has no part in a tensor it computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.annotation import Annotation, AnnotationError
from heteropp.layout.hspmd.deduction import without_sums
from heteropp.layout.hspmd.operators import run
from heteropp.layout.hspmd.resolution import ResolutionError
from heteropp.layout.hspmd.wrapper import WrapperTensor, moved, own


class AnnotatedTensor(WrapperTensor):
    """A tensor on whose parts operators run, as deduced."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return run(function, arguments, named or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AnnotatedTensor({list(self.shape)}, {self.annotation}, local={self.local})"


def annotated(whole: Tensor, annotation: Annotation) -> AnnotatedTensor:
    """This rank's part of a tensor that every rank has. Raises AnnotationError."""
    _check_ranks(annotation)
    if annotation.partial:
        raise AnnotationError(f"a whole tensor cannot lie as {annotation}; expected no summands")
    shape = tuple(whole.shape)
    holding = own(annotation, shape)
    part = None
    if holding is not None:
        part = whole.detach()[holding.box.within(Box.whole(shape))].clone()
    return AnnotatedTensor(part, annotation, shape, whole.dtype, whole.device)


def communicate(tensor: Tensor, target: Annotation) -> Tensor:
    """The communication operator: the same tensor under another annotation.

    Backward takes the gradient to where the tensor came from, with sums in place of summands.
    Raises ResolutionError where nothing leads there.
    """
    _check_ranks(target)
    if not isinstance(tensor, AnnotatedTensor):
        raise AnnotationError(
            f"a plain tensor {list(tensor.shape)} cannot go to {target}; expected an annotated one"
        )
    return _Communicate.apply(tensor, target)


def gradient_moved(gradient: AnnotatedTensor, home: Annotation) -> Tensor:
    """Brings a gradient to the annotation `home` of its tensor, with sums in place of summands.

    Where no communication leads there at once, the summands are first added up where they are.
    """
    target = without_sums(home)
    try:
        return moved(gradient, target)
    except ResolutionError:
        return moved(moved(gradient, without_sums(gradient.annotation)), target)


def _check_ranks(annotation: Annotation) -> None:
    if max(annotation.ranks) >= dist.get_world_size():
        raise AnnotationError(
            f"rank {max(annotation.ranks)} is in the annotation {annotation}; expected ranks 0 to "
            f"{dist.get_world_size() - 1}"
        )


class _Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AnnotatedTensor, target: Annotation) -> Tensor:
        ctx.home = tensor.annotation
        return moved(tensor, target)

    @staticmethod
    def backward(ctx: Any, gradient: AnnotatedTensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient_moved(gradient, ctx.home), None
