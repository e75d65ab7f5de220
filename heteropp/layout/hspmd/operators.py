"""ATen's operators on annotated tensors: what each deduces, and what a rank runs on its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heteropp.layout.hspmd.annotation import PARTIAL, Annotation, Holding
from heteropp.layout.hspmd.deduction import (
    DeductionError,
    Operand,
    OperatorRule,
    attention,
    cut_alike,
    deduce,
    elementwise,
    embedding,
    loss,
    matmul,
    normalisation,
    reduction,
    reshape,
    softmax,
    transpose,
    without_sums,
)
from heteropp.layout.hspmd.wrapper import WrapperTensor, moved, own

aten = torch.ops.aten
MEAN, SUM = 1, 2  # of losses

# of operators that act on each element, those that take summands: of one operand alone, or of all
FIRST = (
    *(aten.detach, aten.alias, aten.clone, aten.neg, aten._to_copy, aten.div, aten.div_),
    *(aten.gelu_backward, aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward),
    aten.threshold_backward,
)
LINEAR: dict[Any, frozenset[int]] = {
    **dict.fromkeys(FIRST, frozenset({0})),
    **dict.fromkeys((aten.mul, aten.mul_), frozenset({0, 1})),
}
ADDITIVE = {aten.add, aten.add_, aten.sub, aten.sub_, aten.copy_}
FILLING = {aten.ones_like, aten.zeros_like, aten.empty_like, aten.full_like}


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, in the order of its schema."""

    function: Any
    arguments: list[Any]
    named: dict[str, Any]

    @property
    def name(self) -> str:
        return self.function.overloadpacket.__name__

    @property
    def tensors(self) -> list[WrapperTensor]:
        return [a for a in self.arguments if isinstance(a, WrapperTensor)]

    @property
    def operands(self) -> list[Operand]:
        schema = self.function._schema.arguments
        return [
            Operand(f"operand {schema[i].name!r} {list(a.shape)}", a.annotation)
            for i, a in enumerate(self.arguments)
            if isinstance(a, WrapperTensor)
        ]

    def local(self) -> Any:
        """This rank's result on what it holds."""
        return self.function(*(_local(a) for a in self.arguments), **self.named)


Local = Callable[[Call, list[Holding]], Any]  # from what this rank shall hold of the results


def run(function: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Deduces the annotations of an operator's results, and computes this rank's parts of them.

    Raises DeductionError where a communication operator must be inserted. In a backward, where
    nobody can, duplicates are cut as other operands are split, which moves nothing.
    """
    call = Call(function, list(arguments), named)
    if function.overloadpacket in FILLING:
        return _filled(call)
    if any(isinstance(value, Tensor) for value in named.values()):
        raise _unknown(call)
    _check_plain(call)
    operator, local = _rule(call)
    if torch._C._current_graph_task_id() != -1:
        call = _cut(call, operator)
    shapes = _result_shapes(call)
    kept = [shape for shape in shapes if shape is not None]
    annotations = iter(deduce(operator, call.operands, [tuple(s.shape) for s in kept]))
    targets = [None if shape is None else next(annotations) for shape in shapes]
    held = [
        None if target is None else own(target, tuple(shape.shape))
        for target, shape in zip(targets, shapes, strict=True)
    ]
    if function._schema.is_mutable:
        _check_in_place(call, targets[0])
    parts: Sequence[Any] = [None] * len(shapes)
    if any(held):
        result = local(call, [holding for holding in held if holding is not None])
        parts = result if isinstance(result, tuple | list) else [result]
    if function._schema.is_mutable:
        return call.arguments[0]
    example = call.tensors[0]
    results = [
        None
        if target is None
        else example.with_local(part, target, tuple(shape.shape), shape.dtype)
        for part, target, shape in zip(parts, targets, shapes, strict=True)
    ]
    return results[0] if len(function._schema.returns) == 1 else tuple(results)


def _local(argument: Any) -> Any:
    return argument.local if isinstance(argument, WrapperTensor) else argument


def _filled(call: Call) -> WrapperTensor:
    """Runs an operator that fills a tensor with constants, like an example of its layout.

    Every rank fills its own part; where the example is a sum, the result has duplicates instead.
    """
    example = call.tensors[0]
    local = None if example.local is None else call.local()
    return example.with_local(
        local, without_sums(example.annotation), dtype=call.named.get("dtype")
    )


def _check_plain(call: Call) -> None:
    """Raises DeductionError for a plain tensor among annotated ones, except for a number that
    every element takes.
    """
    for i, argument in enumerate(call.arguments):
        if not isinstance(argument, Tensor) or isinstance(argument, WrapperTensor):
            continue
        changed = i == 0 and call.function._schema.is_mutable
        if argument.ndim or changed or call.function.overloadpacket in RULES:
            raise DeductionError(
                f"{call.name} takes a plain tensor {list(argument.shape)} beside annotated ones; "
                "expected an annotated tensor"
            )


def _cut(call: Call, operator: OperatorRule) -> Call:
    targets = iter(cut_alike(operator, call.operands))
    arguments = [
        moved(a, next(targets)) if isinstance(a, WrapperTensor) else a for a in call.arguments
    ]
    return Call(call.function, arguments, call.named)


def _result_shapes(call: Call) -> list[Any]:
    """Returns the whole results as meta tensors, with None for each that is not asked for."""

    def meta(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return torch.empty(argument.shape, dtype=argument.dtype, device="meta")
        return argument

    named = {k: "meta" if k == "device" else v for k, v in call.named.items()}
    result = call.function(*map(meta, call.arguments), **named)
    return list(result) if isinstance(result, tuple | list) else [result]


def _check_in_place(call: Call, target: Annotation | None) -> None:
    changed = call.arguments[0]
    if target != changed.annotation:
        raise DeductionError(
            f"{call.name} would make {target} of what lies as {changed.annotation}; "
            "expected operands that leave it so"
        )


# ---------------------------------------------------------------- rules


def _rule(call: Call) -> tuple[OperatorRule, Local]:
    packet, tags = call.function.overloadpacket, call.function.tags
    if packet in RULES:
        return RULES[packet](call)
    drawn = torch.Tag.nondeterministic_seeded in tags  # duplicates would differ
    if packet in LINEAR or packet in ADDITIVE or (torch.Tag.pointwise in tags and not drawn):
        return _elementwise(call)
    raise _unknown(call)


def _unknown(call: Call) -> DeductionError:
    return DeductionError(
        f"{call.name} is no operator that annotated tensors can take so; expected elementwise "
        "ones, products, sums, reshapes, embeddings, normalisation, attention, softmax or losses, "
        "without dropout and masks"
    )


def _as_it_is(call: Call, _held: list[Holding]) -> Any:
    return call.local()


def _reshaped(call: Call, held: list[Holding]) -> Tensor:
    return _local(call.arguments[0]).reshape(held[0].box.shape)


def _elementwise(call: Call) -> tuple[OperatorRule, Local]:
    packet = call.function.overloadpacket
    shapes = [tuple(tensor.shape) for tensor in call.tensors]
    additive = packet in ADDITIVE and len(shapes) == 2
    rounds = call.named.get("dtype") or call.named.get("rounding_mode")
    over_a_number = packet in FIRST and not isinstance(call.arguments[0], WrapperTensor)
    linear = () if rounds or over_a_number else LINEAR.get(packet, ())
    return elementwise(call.name, shapes, linear, additive), _as_it_is


def _like(call: Call) -> tuple[OperatorRule, Local]:
    """An uninitialised tensor, into which autograd copies a gradient that two tensors share."""
    shape = tuple(call.tensors[0].shape)

    def local(call: Call, _held: list[Holding]) -> Tensor:
        return torch.empty_like(_local(call.arguments[0]))

    return elementwise(call.name, [shape], {0}), local


def _matmul(call: Call) -> tuple[OperatorRule, Local]:
    one, other = call.tensors
    return matmul(call.name, one.ndim, other.ndim), _as_it_is


def _addmm(call: Call) -> tuple[OperatorRule, Local]:
    """Where the product is a sum over ranks, one of them adds the bias."""
    bias, one, other = call.arguments
    shape = (one.shape[0], other.shape[1])
    scales = [call.named.get(scale, 1) for scale in ("beta", "alpha")]
    if scales != [1, 1] or tuple(bias.shape) != shape[1:]:
        raise DeductionError(
            f"{call.name} takes a bias {list(bias.shape)} with beta {scales[0]} and alpha "
            f"{scales[1]}; expected a bias {list(shape[1:])}, and both 1"
        )
    product = matmul(call.name, 2, 2)
    operator = OperatorRule(call.name, (("n",), *product.inputs), product.outputs)

    def local(call: Call, held: list[Holding]) -> Tensor:
        bias, one, other = call.arguments
        over_subgroups = deduce(operator, call.operands, [shape])[0].hdim == PARTIAL
        subgroup, summand = held[0].summand or (0, 0)
        result = one.local @ other.local
        first = summand == 0 and (subgroup == 0 or not over_subgroups)
        return result + bias.local if first else result

    return operator, local


def _dimensions(call: Call) -> list[int]:
    """Returns the dimensions that a reduction runs over."""
    count = call.tensors[0].ndim
    given = call.arguments[1] if len(call.arguments) > 1 else None
    return [d % count for d in given] if given else list(range(count))


def _sum(call: Call) -> tuple[OperatorRule, Local]:
    keep = len(call.arguments) > 2 and call.arguments[2]
    over = _dimensions(call)
    return reduction(call.name, call.tensors[0].ndim, over, keep), _as_it_is


def _mean(call: Call) -> tuple[OperatorRule, Local]:
    """A sum over this rank's part, divided by how many there are in all."""
    over = _dimensions(call)
    keep = len(call.arguments) > 2 and call.arguments[2]
    count = math.prod(call.tensors[0].shape[d] for d in over)

    def local(call: Call, _held: list[Holding]) -> Tensor:
        dtype = call.named.get("dtype")
        return _local(call.arguments[0]).sum(over, keep, dtype=dtype) / count

    return reduction(call.name, call.tensors[0].ndim, over, keep), local


def _reshape(call: Call) -> tuple[OperatorRule, Local]:
    before, after = tuple(call.tensors[0].shape), tuple(_result_shapes(call)[0].shape)
    return reshape(call.name, before, after), _reshaped


def _expand(call: Call) -> tuple[OperatorRule, Local]:
    before, after = tuple(call.tensors[0].shape), tuple(_result_shapes(call)[0].shape)
    labels = tuple(f"d{i}" for i in range(len(after)))
    added = len(after) - len(before)
    kept = tuple(
        label if size == after[added + i] else f"one{i}"
        for i, (label, size) in enumerate(zip(labels[added:], before, strict=True))
    )

    def local(call: Call, held: list[Holding]) -> Tensor:
        return _local(call.arguments[0]).expand(held[0].box.shape)

    return OperatorRule(call.name, (kept,), (labels,), linear=frozenset({0})), local


def _transpose(call: Call) -> tuple[OperatorRule, Local]:
    order = list(range(call.tensors[0].ndim))
    if call.function.overloadpacket is aten.permute:
        order = [d % len(order) for d in call.arguments[1]]
    else:
        one, other = call.arguments[1:] if len(call.arguments) > 1 else (-1, 0)
        order[one], order[other] = order[other], order[one]
    return transpose(call.name, order), _as_it_is


def _embedding(call: Call) -> tuple[OperatorRule, Local]:
    """Looks tokens up in this rank's part of the vocabulary; tokens of other parts give zeros."""
    if len(call.arguments) > 3 and call.arguments[3]:
        raise DeductionError(
            f"{call.name} divides gradients by how often one rank has a token; expected "
            "scale_grad_by_freq=False"
        )

    def local(call: Call, _held: list[Holding]) -> Tensor:
        table, tokens = call.tensors
        holding = own(table.annotation, tuple(table.shape))
        assert holding is not None and tokens.local is not None
        if ((tokens.local < 0) | (tokens.local >= table.shape[0])).any():
            raise IndexError(
                f"{call.name} takes tokens {int(tokens.local.min())} to {int(tokens.local.max())}; "
                f"expected 0 to {table.shape[0] - 1}"
            )
        first, last = holding.box.ranges[0]
        elsewhere = (tokens.local < first) | (tokens.local >= last)
        found = aten.embedding(table.local, (tokens.local - first).masked_fill(elsewhere, 0))
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    return embedding(call.name, call.tensors[1].ndim), local


def _embedding_backward(call: Call) -> tuple[OperatorRule, Local]:
    rows = tuple(f"r{i}" for i in range(call.tensors[1].ndim))
    inputs = ((*rows, "hidden"), rows)
    return OperatorRule(call.name, inputs, (("vocab", "hidden"),), linear=frozenset({0})), _as_it_is


def _layer_norm(call: Call) -> tuple[OperatorRule, Local]:
    x, shape, *_ = call.arguments
    operator = normalisation(call.name, x.ndim, len(shape))
    inputs = operator.inputs[: len(call.tensors)]
    return OperatorRule(call.name, inputs, operator.outputs, operator.whole), _as_it_is


def _layer_norm_backward(call: Call) -> tuple[OperatorRule, Local]:
    _, x, shape, _, _, weight, bias, mask = call.arguments
    forward = normalisation(call.name, x.ndim, len(shape))
    (rows, inner, _), (_, kept, _) = forward.inputs, forward.outputs
    given = [inner for parameter in (weight, bias) if parameter is not None]
    inputs = (rows, rows, kept, kept, *given)
    outputs = tuple(o for o, asked in zip((rows, inner, inner), mask, strict=True) if asked)
    return OperatorRule(call.name, inputs, outputs, forward.whole, frozenset({0})), _as_it_is


def _softmax(call: Call) -> tuple[OperatorRule, Local]:
    tensors = call.tensors
    over = call.arguments[len(tensors)] % tensors[0].ndim
    return softmax(call.name, tensors[0].ndim, over, len(tensors)), _as_it_is


def _attention(call: Call) -> tuple[OperatorRule, Local]:
    if len(call.arguments) > 3 and call.arguments[3]:  # dropout
        raise _unknown(call)
    return attention(call.name, call.tensors[0].ndim), _as_it_is


def _attention_backward(call: Call) -> tuple[OperatorRule, Local]:
    forward = attention(call.name, call.tensors[0].ndim)
    output, rows = forward.outputs
    inputs = (output, *forward.inputs, output, rows)
    return OperatorRule(call.name, inputs, forward.inputs, forward.whole, frozenset({0})), _as_it_is


def _class_loss(call: Call) -> tuple[OperatorRule, Local]:
    """A classification loss, summed over rows.

    Its second result, the number of rows, is of use only to a mean.
    """
    _rows_summed(call, call.arguments[3])
    if call.arguments[2] is not None:
        raise DeductionError(f"{call.name} takes weights of classes; expected none")
    operator = loss(call.name)
    return OperatorRule(call.name, operator.inputs, ((), ()), operator.whole), _as_it_is


def _class_loss_backward(call: Call) -> tuple[OperatorRule, Local]:
    _rows_summed(call, call.arguments[4])
    forward = loss(call.name)
    scores, rows = forward.inputs
    call.arguments[6] = torch.zeros((), dtype=call.tensors[0].dtype)
    return OperatorRule(
        call.name, ((), scores, rows), (scores,), forward.whole, frozenset({0})
    ), _as_it_is


def _rows_summed(call: Call, how: int) -> None:
    if how != SUM:
        raise DeductionError(
            f"{call.name} divides by the rows of one rank; expected reduction='sum', and a "
            "division by all rows after it"
        )


def _squares(call: Call) -> tuple[OperatorRule, Local]:
    """A squared error; its mean divides by the elements of all ranks, not by this rank's part."""
    how = call.arguments[2] if len(call.arguments) > 2 else MEAN
    return _squared(call, how, backward=False)


def _squares_backward(call: Call) -> tuple[OperatorRule, Local]:
    return _squared(call, call.arguments[3], backward=True)


def _squared(call: Call, how: int, backward: bool) -> tuple[OperatorRule, Local]:
    one, other = call.tensors[-2:]
    labels = tuple(f"d{i}" for i in range(one.ndim))
    if one.shape != other.shape or how not in (MEAN, SUM):
        raise DeductionError(
            f"{call.name} takes {list(one.shape)} and {list(other.shape)}; expected equal shapes "
            "and reduction 'sum' or 'mean'"
        )
    count = math.prod(one.shape) if how == MEAN else 1

    def local(call: Call, _held: list[Holding]) -> Tensor:
        parts = [_local(tensor) for tensor in call.tensors]
        return call.function(*parts, SUM) / count

    if backward:
        inputs: tuple[tuple[str, ...], ...] = ((), labels, labels)
        return OperatorRule(call.name, inputs, (labels,), linear=frozenset({0})), local
    return OperatorRule(call.name, (labels, labels), ((),)), local


RULES: dict[Any, Callable[[Call], tuple[OperatorRule, Local]]] = {
    **dict.fromkeys((aten.mm, aten.bmm), _matmul),
    aten.addmm: _addmm,
    aten.new_empty_strided: _like,
    aten.sum: _sum,
    aten.mean: _mean,
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze), _reshape
    ),
    aten.expand: _expand,
    **dict.fromkeys((aten.t, aten.transpose, aten.permute), _transpose),
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    **dict.fromkeys(
        (
            aten._softmax,
            aten._log_softmax,
            aten._softmax_backward_data,
            aten._log_softmax_backward_data,
        ),
        _softmax,
    ),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.nll_loss_forward: _class_loss,
    aten.nll_loss_backward: _class_loss_backward,
    aten.mse_loss: _squares,
    aten.mse_loss_backward: _squares_backward,
}
