"""Magnitudes of the terms that softmax and normalisations add up, from their definitions.

Where terms cancel, their rounding errors stay. So each function computes the sum that the operator
computes, but of the terms' absolute values. All is in float64; results are named as the operator's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, prod

import torch
from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.definitions import Results, argument


def _softmax(call: Call) -> Results:
    below = _below_largest(call)
    powers = torch.exp(-below)
    powers = powers / powers.sum(argument(call, "dim"), keepdim=True)
    return {"out": powers * (1 + below)}


def _log_softmax(call: Call) -> Results:
    length = max(call.args[0].shape[argument(call, "dim")], 1) if call.args[0].dim() else 1
    return {"out": 1 + _below_largest(call) + log(length)}


def _below_largest(call: Call) -> Tensor:
    x, dim = call.args[0], argument(call, "dim")
    return x.amax(dim, keepdim=True) - x


def _softmax_backward(call: Call) -> Results:
    """Magnitudes of the terms of dx = y * (dy - sum(y * dy))."""
    dy, y, dim = call.args[0].abs(), call.args[1], argument(call, "dim")
    return {"out": y * (dy + (y * dy).sum(dim, keepdim=True))}


def _log_softmax_backward(call: Call) -> Results:
    """Magnitudes of the terms of dx = dy - exp(y) * sum(dy)."""
    dy, y, dim = call.args[0].abs(), call.args[1], argument(call, "dim")
    return {"out": dy + y.exp() * dy.sum(dim, keepdim=True)}


def _layer_norm(call: Call) -> Results:
    """Magnitudes of the terms of out = (x - mean) * rstd * weight + bias, and of mean and rstd."""
    x, length = call.args[0], _length(call)
    rows = x.reshape(-1, length)
    variance, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + argument(call, "eps"))
    terms = rows.abs() + rows.abs().mean(1, keepdim=True)
    enlarged = 1 + rstd**2 * ((rows - mean).abs() * terms).mean(1, keepdim=True)
    out = terms * rstd * _weight(call)
    bias = argument(call, "bias")
    out = out if bias is None else out + bias.abs().reshape(-1)
    return {"out.0": out, "out.1": rows.abs().mean(1), "out.2": rstd * enlarged}


def _rms_norm(call: Call) -> Results:
    """Magnitudes of the terms of out = x * rstd * weight, and of rstd."""
    x, eps = call.args[0], argument(call, "eps")
    rows = x.reshape(-1, _length(call))
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    rstd = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    return {"out.0": rows.abs() * rstd * _weight(call), "out.1": rstd}


def _norm_backward(call: Call) -> Results:
    """Magnitudes of the terms of the gradients dx, dw and db.

    dx = rstd * (g - mean(g) - n * mean(g * n)), dw = sum(dy * n) and db = sum(dy), with
    n = (x - mean) * rstd and g = dy * weight; a root-mean-square norm has no mean.
    """
    length = _length(call)
    dy, x = (argument(call, name).abs().reshape(-1, length) for name in ("grad_out", "input"))
    mean, rstd = argument(call, "mean"), argument(call, "rstd").reshape(-1, 1)
    n = (x if mean is None else x + mean.abs().reshape(-1, 1)) * rstd
    g = dy * _weight(call)
    dx = rstd * (g + g.mean(1, keepdim=True) + n * (g * n).mean(1, keepdim=True))
    return {"out.0": dx, "out.1": (dy * n).sum(0), "out.2": dy.sum(0)}


def _length(call: Call) -> int:
    return max(prod(argument(call, "normalized_shape")), 1)


def _weight(call: Call) -> Tensor:
    weight = argument(call, "weight")
    return torch.ones(()) if weight is None else weight.abs().reshape(-1)


TERMS: dict[str, Callable[[Call], Results]] = {
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _norm_backward,
}
