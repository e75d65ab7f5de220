"""Operators by their definitions, in float64: fused ones that chips have and the host has not."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from ditorch.precision.call import Call

Results = dict[str, Tensor]
Run = Callable[[Call], Results]


def definition_of(call: Call) -> Run | None:
    """What computes the results whose values are defined, by their names; None for most."""
    name = call.operator.split(".")[1]
    if name.startswith("_scaled_dot_product_") and not argument(call, "dropout_p"):
        return _attention_backward if name.endswith("_backward") else _attention
    if name == "_grouped_mm" and argument(call, "offs") is not None:
        return _grouped_mm
    return _rms_norm_backward if name == "_fused_rms_norm_backward" else None


def argument(call: Call, name: str) -> Any:
    """The argument's value or default; None if the operator has no such argument."""
    for position, each in enumerate(call.func._schema.arguments):
        if each.name == name:
            if position < len(call.args):
                return call.args[position]
            return call.kwargs.get(name, each.default_value)
    return None


def _attention(call: Call) -> Results:
    """out = softmax(query @ key^T * scale + bias) @ value; [batch, heads, sequence, head] each."""
    powers = _attention_weights(call)
    return {"out.0": powers @ _for_each_head(argument(call, "value"), powers)}


def _attention_backward(call: Call) -> Results:
    query, key, value = (argument(call, name) for name in ("query", "key", "value"))
    powers = _attention_weights(call)
    gradient = _gradient(call)
    d_powers = gradient @ _for_each_head(value, powers).mT
    d_scores = powers * (d_powers - (d_powers * powers).sum(-1, keepdim=True)) * _factor(call)
    return _through_products(d_scores, powers, gradient, query, key, value)


def attention_backward_terms(call: Call) -> Results:
    """The magnitudes of what the gradients add up; scores err with what they add up, too."""
    query, key, value = (argument(call, name).abs() for name in ("query", "key", "value"))
    powers, gradient, factor = _attention_weights(call), _gradient(call).abs(), abs(_factor(call))
    powers = powers * (1 + query @ _for_each_head(key, query).mT * factor)
    d_powers = gradient @ _for_each_head(value, powers).mT
    d_scores = powers * (d_powers + (d_powers * powers).sum(-1, keepdim=True)) * factor
    return _through_products(d_scores, powers, gradient, query, key, value)


def _gradient(call: Call) -> Tensor:
    gradient = argument(call, "grad_out_")
    found: Tensor = argument(call, "grad_out") if gradient is None else gradient
    return found


def _through_products(
    d_scores: Tensor, powers: Tensor, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Results:
    return {
        "out.0": d_scores @ _for_each_head(key, powers),
        "out.1": _sum_of_groups(d_scores.mT @ query, key),
        "out.2": _sum_of_groups(powers.mT @ gradient, value),
    }


def _attention_weights(call: Call) -> Tensor:
    query, key = argument(call, "query"), argument(call, "key")
    scores = query @ _for_each_head(key, query).mT * _factor(call)
    bias = argument(call, "attn_bias")
    bias = argument(call, "attn_mask") if bias is None else bias
    if bias is not None and bias.dtype is torch.bool:
        scores = scores.masked_fill(~bias, -inf)
    elif bias is not None:
        scores = scores + bias
    if argument(call, "is_causal"):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -inf)
    return torch.softmax(scores, dim=-1)


def _factor(call: Call) -> float:
    scale: float | None = argument(call, "scale")
    return 1 / sqrt(argument(call, "query").shape[-1]) if scale is None else scale


def _for_each_head(shared: Tensor, query: Tensor) -> Tensor:
    """Keys and values may be shared by groups of heads."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)


def _sum_of_groups(gradient: Tensor, shared: Tensor) -> Tensor:
    groups = gradient.shape[-3] // shared.shape[-3]
    return gradient.unflatten(-3, (shared.shape[-3], groups)).sum(-3)


def _grouped_mm(call: Call) -> Results:
    """Groups of rows, each with its own matrix; or columns of groups with the rows of these."""
    left, right = argument(call, "self"), argument(call, "mat2")
    ends = argument(call, "offs").tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if right.dim() == 2:
        return {"out": torch.stack([left[:, i:j] @ right[i:j] for i, j in spans])}
    out = left.new_zeros(len(left), right.shape[-1])
    for (i, j), matrix in zip(spans, right, strict=True):
        out[i:j] = left[i:j] @ matrix
    return {"out": out}


def _rms_norm_backward(call: Call) -> Results:
    """dx = rstd * (g - n * mean(g * n)) and dw = sum(dy * n), n = x * rstd, g = dy * weight."""
    dy, x, rstd = (argument(call, name) for name in ("grad_out", "input", "rstd"))
    weight, shape = argument(call, "weight"), argument(call, "normalized_shape")
    rows = x.numel() // max(prod(shape), 1)
    dy, n = (each.reshape(rows, -1) for each in (dy, x * rstd))
    g = dy if weight is None else dy * weight.reshape(1, -1)
    dx = rstd.reshape(rows, 1) * (g - n * (g * n).mean(1, keepdim=True))
    wanted = argument(call, "output_mask")
    results = {"out.0": dx.reshape(x.shape), "out.1": (dy * n).sum(0).reshape(shape)}
    asked = zip(results.items(), wanted, strict=True)
    return {name: each for (name, each), is_wanted in asked if is_wanted}
