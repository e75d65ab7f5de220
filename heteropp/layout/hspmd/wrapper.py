"""What operators see of an annotated tensor: this rank's part, its annotation, and how it moves.

tensor.py stands on operators.py, to which torch's dispatch leads, and both on this file.
"""

from __future__ import annotations

from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.layout.hspmd import exchange
from heteropp.layout.hspmd.annotation import Annotation, Holding, holdings
from heteropp.layout.hspmd.resolution import resolve


class WrapperTensor(Tensor):
    """Looks like the whole tensor; `local` is this rank's part of it, None where it has none.

    Only a subclass that dispatches operators can be made.
    """

    local: Tensor | None
    annotation: Annotation

    @staticmethod
    def __new__(
        cls,
        local: Tensor | None,
        annotation: Annotation,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        result = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        result.local, result.annotation = local, annotation
        return result

    def with_local(
        self,
        local: Tensor | None,
        annotation: Annotation,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Returns another tensor of this class, by default of this shape and dtype."""
        shape = tuple(self.shape) if shape is None else shape
        return type(self)(local, annotation, shape, dtype or self.dtype, self.device)


Wrapped = TypeVar("Wrapped", bound=WrapperTensor)


def own(annotation: Annotation, shape: tuple[int, ...]) -> Holding | None:
    """What this rank holds."""
    rank = dist.get_rank()
    return next((h for h in holdings(annotation, shape) if h.rank == rank), None)


def moved(tensor: Wrapped, target: Annotation) -> Wrapped:
    """Brings a tensor under another annotation, as `communicate` does, but outside of autograd."""
    communication = resolve(tensor.annotation, target, tuple(tensor.shape), tensor.dtype.itemsize)
    local = exchange.communicate(
        communication, dist.get_rank(), tensor.local, tensor.dtype, tensor.device
    )
    return tensor.with_local(local, target)
