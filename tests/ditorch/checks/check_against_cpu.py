"""Every operator of PyTorch's own test database, forward and backward, against the CPU.

On a neutral chip the results are the CPU's bit for bit. A chip with kernels of its own may differ
in the last digits; there only the operators that may reach such a kernel are compared.
"""

import os
import sys
import tomllib
import types
import unittest
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ditorch

# The database imports expecttest for helpers that are not used here.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

SAMPLES = 2
ONE_IN = int(os.environ.get("ONE_OPERATOR_IN", "1"))  # fewer where the whole proves no more
CHIP = os.environ.get("EMUCHIP_CHIP")  # without: a vendor that has no kernels
NEUTRAL = CHIP is None or tomllib.loads(Path(CHIP).read_text())["numerics"]["neutral"]
TOLERANCE = {"rtol": 0.0, "atol": 0.0} if NEUTRAL else {"rtol": 1e-3, "atol": 1e-3}

# Samples that mean something else once their tensors are on a device.
NOT_COMPARABLE = {
    "to": "takes the device from its arguments",
    "tensor_split": "wants its indices on the CPU",
    "as_strided": "reads storage around the tensor, which a copy does not have",
    "to_sparse": "makes sparse tensors, which the device refuses",
    "sparse.mm": "makes sparse tensors, which the device refuses",
    "sparse.sampled_addmm": "makes sparse tensors, which the device refuses",
    "linalg.eig": "the CPU refuses this gradient too",
    "linalg.eigvals": "the CPU refuses this gradient too",
}
OWN_KERNELS = ("mm", "mul", "dot", "linear", "softmax", "norm", "sum", "mean", "attention", "loss",
               "einsum", "entropy", "inner", "mv")  # fmt: skip
UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
                 "new_empty_strided"}  # fmt: skip


class Dropouts(TorchDispatchMode):
    """Whether dropout ran: a chip's own kernel drops other elements than the CPU does."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        self.seen |= function is torch.ops.aten.native_dropout.default
        return function(*args, **(kwargs or {}))


def to_device(values: Any) -> Any:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        return value.detach().to("device").requires_grad_(value.requires_grad)

    return tree_map(move, values)


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def gradients(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    real = [torch.view_as_real(r.resolve_conj()) if r.is_complex() else r for r in results]
    total = [r.sum() for r in real if r.requires_grad]
    wanted = [i for i in inputs if i.requires_grad]
    if not total or not wanted:
        return []
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def compare(op: Any, sample: Any) -> bool:
    """False if the CPU refuses the sample; asserts that the device agrees otherwise."""
    torch.manual_seed(7)
    try:
        expected = tensors(op(sample.input, *sample.args, **sample.kwargs))
    except Exception:
        return False
    value, args, kwargs = to_device((sample.input, sample.args, sample.kwargs))
    if "device" in kwargs:
        kwargs["device"] = "device"
    torch.manual_seed(7)
    with Dropouts() as dropouts:
        results = tensors(op(value, *args, **kwargs))
    assert all(r.device == ditorch.device for r in results)
    assert [(r.shape, r.dtype) for r in results] == [(e.shape, e.dtype) for e in expected]
    if op.name in UNINITIALIZED or (dropouts.seen and not NEUTRAL):
        return True
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True, **TOLERANCE)
        assert ours.stride() == theirs.stride()
    inputs = tensors((sample.input, sample.args, sample.kwargs))
    on_device = tensors((value, args, kwargs))
    for ours, theirs in zip(
        gradients(results, on_device), gradients(expected, inputs), strict=True
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True, **TOLERANCE)
    return True


def chosen(op: Any) -> bool:
    if op.name in NOT_COMPARABLE or op.name.startswith("jiterator"):  # CUDA's alone
        return False
    return torch.float32 in op.dtypes and (NEUTRAL or any(k in op.name for k in OWN_KERNELS))


@pytest.mark.parametrize(
    "op", [op for op in op_db if chosen(op)][::ONE_IN], ids=lambda op: op.full_name
)
def test_operator(op: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        compared = sum(compare(op, sample) for sample in islice(samples, SAMPLES))
    assert compared
