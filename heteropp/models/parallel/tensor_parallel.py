"""Tensor parallelism: layers cut over the ranks of one replica (Megatron-LM's scheme).

With sequence parallelism the rows are cut too, wherever a layer treats each by itself: norms, sums
and dropout. Then an all-gather stands where otherwise copies are, and a reduce-scatter in place of
an all-reduce (Reducing Activation Recomputation in Large Transformer Models, section 4.2.2).

Declared on plain modules (layout/hspmd/declaration.py) the same cuts compute the same. Training
calls these layers all the same: a declared layer sends every operator through Python, communicates
by itself where layers that share an input could do it once, and knows neither weight gradients that
wait (backward.py) nor a loss over a cut vocabulary. A layer here knows only how large its slice of
a weight is; which one it is, its Parameter says.

A group is what TensorParallelGroup says; a planner passes one that only counts. A group of size 1
adds no operator and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from heteropp.models.parallel.backward import linear
from heteropp.process_groups.collective import all_gather, reduce_scatter


class TensorParallelGroup(Protocol):
    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def sequence_parallel(self) -> bool:
        """Whether a rank holds only its part of the rows, between the layers that are cut."""

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        """Sums (or takes the maximum of) a tensor over the group, in place."""

    def all_gather(self, output: Tensor, piece: Tensor) -> None:
        """Fills `output` with the group's pieces, in index order along dimension 0."""

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> None:
        """Sums `whole` over the group; each rank's `piece` is its part, along dimension 0."""


Exchange = Callable[[Tensor, TensorParallelGroup], Tensor]


class SoloGroup:
    """One rank that holds a whole replica."""

    size = 1
    index = 0
    sequence_parallel = False

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        pass

    def all_gather(self, output: Tensor, piece: Tensor) -> None:
        output.copy_(piece)

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> None:
        piece.copy_(whole)


class ProcessGroup:
    """The ranks of one replica, over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool = False) -> None:
        self.group = group
        self.size = group.size()
        self.index = group.rank()
        self.sequence_parallel = sequence_parallel

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(tensor, operation, group=self.group)

    def all_gather(self, output: Tensor, piece: Tensor) -> None:
        all_gather(output, piece, self.group)

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> None:
        reduce_scatter(piece, whole, self.group)


class _Exchange(torch.autograd.Function):
    """One exchange with the group forward, and another backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TensorParallelGroup, there: Exchange, back: Exchange
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.back(gradient, ctx.group), None, None, None


class _Sum(torch.autograd.Function):
    """All-reduce in place, which autograd has to be told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup) -> Tensor:
        group.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def _same(x: Tensor, group: TensorParallelGroup) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: TensorParallelGroup) -> Tensor:
    # a fresh tensor: autograd may have handed this one to others too
    result = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(result)
    return result


def _joined(piece: Tensor, group: TensorParallelGroup) -> Tensor:
    rows, features = piece.shape
    return _gathered(piece, group).view(-1, rows, features).transpose(0, 1).reshape(rows, -1)


def _own(whole: Tensor, group: TensorParallelGroup) -> Tensor:
    return whole.chunk(group.size, 1)[group.index].contiguous()


def _own_rows(whole: Tensor, group: TensorParallelGroup) -> Tensor:
    return whole.chunk(group.size)[group.index].contiguous()


def _gathered(piece: Tensor, group: TensorParallelGroup) -> Tensor:
    whole = piece.new_empty((piece.shape[0] * group.size, *piece.shape[1:]))
    group.all_gather(whole, piece.contiguous())
    return whole


def _scattered(whole: Tensor, group: TensorParallelGroup) -> Tensor:
    piece = whole.new_empty((whole.shape[0] // group.size, *whole.shape[1:]))
    group.reduce_scatter(piece, whole.contiguous())
    return piece


def copy_to_group(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Stands before column-parallel layers: every rank has all rows behind it.

    Identity forward, all-reduce backward; of rows that are cut, all-gather and reduce-scatter.
    """
    if group.size == 1:
        return x
    if not group.sequence_parallel:
        return sum_gradient(x, group)
    return _Exchange.apply(x, group, _gathered, _scattered)


def sum_over_group(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Stands after row-parallel layers, whose results are parts of a sum.

    All-reduce forward (in place), identity backward; where rows are cut, reduce-scatter and
    all-gather.
    """
    if group.size == 1:
        return x
    if not group.sequence_parallel:
        return total(x, group)
    return _Exchange.apply(x, group, _scattered, _gathered)


def sum_gradient(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Identity forward, all-reduce backward, whatever the rows."""
    return x if group.size == 1 else _Exchange.apply(x, group, _same, _summed)


def total(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """All-reduce forward (in place), identity backward, whatever the rows."""
    return x if group.size == 1 else _Sum.apply(x, group)


def all_rows(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """All-gather of rows forward; backward takes this rank's of a gradient that all have."""
    return x if group.size == 1 else _Exchange.apply(x, group, _gathered, _own_rows)


def own_rows(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Takes this rank's part of rows that all ranks have; all-gather backward."""
    return x if group.size == 1 else _Exchange.apply(x, group, _own_rows, _gathered)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity forward; backward multiplies."""
    return _ScaleGradient.apply(x, factor)


def gather_features(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Stands after a column-parallel layer whose result every rank wants whole, [rows, out].

    All-gather forward; backward takes this rank's features of a gradient that all have.
    """
    return x if group.size == 1 else _Exchange.apply(x, group, _joined, _own)


def own_features(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Stands before a row-parallel layer whose input every rank has whole, [rows, in].

    Takes this rank's features forward; all-gather backward.
    """
    return x if group.size == 1 else _Exchange.apply(x, group, _own, _joined)


class ColumnParallelLinear(nn.Module):
    """[rows, in] to this rank's [rows, out / size]; weight and bias are cut along the outputs."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs // group.size, inputs, **kind))
        self.bias = nn.Parameter(torch.empty(outputs // group.size, **kind)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's [rows, in / size] to [rows, out]; the weight is cut along its inputs.

    With sequence parallelism the result is this rank's part of the rows.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(outputs, inputs // group.size, **kind))
        self.bias = nn.Parameter(torch.empty(outputs, **kind)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return linear(x, self.weight, self.bias)
        result = sum_over_group(linear(x, self.weight), self.group)
        return result if self.bias is None else result + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Tokens [rows] to [rows, hidden]; the table is cut along the vocabulary.

    With sequence parallelism the result is this rank's part of the rows.
    """

    def __init__(self, vocab: int, hidden: int, group: TensorParallelGroup, **kind: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(vocab // group.size, hidden, **kind))

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weight, self.group)


def embed(
    tokens: Tensor, weight: Tensor, group: TensorParallelGroup, padding: int | None = None
) -> Tensor:
    """Tokens [..] to [.., hidden]; the table, [vocab / size, hidden], is cut along its rows.

    padding: a token whose row learns nothing.
    """
    if group.size == 1:
        return F.embedding(tokens, weight, padding)
    local, elsewhere = _local_tokens(tokens, weight.shape[0], group.index)
    if padding is not None:
        padding -= group.index * weight.shape[0]
        padding = padding if 0 <= padding < weight.shape[0] else None
    found = F.embedding(local, weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)
    return sum_over_group(found, group)


def cross_entropy_sum(logits: Tensor, targets: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sum over rows of the cross entropy; logits [rows, vocab / size] are cut like the head.

    Rows whose target is below 0 take no part.
    """
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    if group.size == 1:
        return F.cross_entropy(logits, targets, reduction="sum")
    return _CrossEntropySum.apply(logits, targets, group)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: TensorParallelGroup) -> Tensor:
        local, elsewhere = _local_tokens(targets, logits.shape[1], group.index)
        largest = logits.amax(1)
        group.all_reduce(largest, maximum=True)
        shifted = logits - largest.unsqueeze(1)
        picked = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(1), picked))  # one all-reduce for both
        group.all_reduce(sums)
        total, picked = sums.unbind(0)
        ignored = targets < 0
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), local, elsewhere, ignored)
        return (total.log() - picked).masked_fill(ignored, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        softmax, local, elsewhere, ignored = ctx.saved_tensors
        by_row = gradient.expand(local.shape).masked_fill(ignored, 0)
        one = by_row.masked_fill(elsewhere, 0)
        result = softmax * by_row.unsqueeze(1)
        result.scatter_add_(1, local.unsqueeze(1), one.neg().unsqueeze(1))
        return result, None, None


def _local_tokens(tokens: Tensor, size: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens in this rank's vocabulary, 0 for others, and a mask of those others."""
    local = tokens - index * size
    elsewhere = (local < 0) | (local >= size)
    return local.masked_fill(elsewhere, 0), elsewhere
