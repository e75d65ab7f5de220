"""What the ranks of a tensor-parallel group tell each other inside a family's modules.

Some values all ranks have alike: what cut layers take, and what they give together. How the
gradient of such a value lies over the ranks is what the classes differ in. Where sequence
parallelism cuts rows the ranks' gradients sum up to the whole one, and so do those of parameters
that are not cut, wherever these are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from heteropp.models.parallel.tensor_parallel import (
    TensorParallelGroup,
    all_rows,
    copy_to_group,
    gather_features,
    own_features,
    own_rows,
    scale_gradient,
    sum_gradient,
    sum_over_group,
    total,
)


class GroupCommunication:
    """Every rank has the whole gradient, as without sequence parallelism.

    With it this is for the head, before which rows are gathered.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group

    def copied(self, x: Tensor) -> Tensor:
        """Stands where each rank begins to compute something else with what all have alike."""
        return copy_to_group(x, self.group)

    def summed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the sum of the ranks' results, which `x` becomes, and one bias."""
        x = sum_over_group(x, self.group)
        return x if bias is None else x + bias

    def joined(self, x: Tensor) -> Tensor:
        """Returns the features of all ranks, [rows, out], of which each has its own."""
        return gather_features(x, self.group)

    def parted(self, x: Tensor) -> Tensor:
        """Returns this rank's features of [rows, in], which all have alike."""
        return own_features(x, self.group)


class Within(GroupCommunication, ABC):
    """Communicates in a module that has all rows, of a block that has a rank's own."""

    @abstractmethod
    def entered(self, x: Tensor) -> Tensor:
        """Returns all rows, [rows, ..], of which each rank has its own, [rows / tp, ..]."""

    @abstractmethod
    def left(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of what the module gives."""


class EqualParts(Within):
    """Every rank has the whole gradient over the number of ranks.

    But for that factor the module computes and communicates what it does without sequence
    parallelism. So this is for any, also one in which a norm follows on a sum of ranks.
    """

    def entered(self, x: Tensor) -> Tensor:
        return self._whole(all_rows(x, self.group))

    def left(self, x: Tensor) -> Tensor:
        return own_rows(self._part(x), self.group)

    def copied(self, x: Tensor) -> Tensor:
        return sum_gradient(self._part(x), self.group)

    def summed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self._whole(total(x, self.group))
        return x if bias is None else x + bias

    def joined(self, x: Tensor) -> Tensor:
        return self._whole(gather_features(x, self.group))

    def parted(self, x: Tensor) -> Tensor:
        return own_features(self._part(x), self.group)

    def _whole(self, x: Tensor) -> Tensor:
        return scale_gradient(x, self.group.size)

    def _part(self, x: Tensor) -> Tensor:
        return scale_gradient(x, 1 / self.group.size)


class SummedLast(Within):
    """Every rank has a summand, of what it computes with its weights.

    Ranks are summed but once, behind the module: nothing follows on its sums that is not linear.
    """

    def entered(self, x: Tensor) -> Tensor:
        return copy_to_group(x, self.group)

    def left(self, x: Tensor) -> Tensor:
        return sum_over_group(x, self.group)

    def copied(self, x: Tensor) -> Tensor:
        return x

    def summed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x if bias is None or self.group.index else x + bias

    def joined(self, x: Tensor) -> Tensor:
        return sum_gradient(gather_features(x, self.group), self.group)

    def parted(self, x: Tensor) -> Tensor:
        features = x.shape[1] // self.group.size
        return x.narrow(1, self.group.index * features, features)
