"""Where CUDA has an operator for a dtype and the CPU has not, the chip has it, or says why not.

The pairs are those of PyTorch's operator database. The truth is the CPU's result in a wider dtype.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import ditorch

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.float32: torch.float64,
}
"""Other dtypes are compared in float64 after the call."""

EVERY_DAY = {
    "abs", "histc", "nn.functional.avg_pool3d", "nn.functional.conv2d", "trace", "sum", "prod",
    "tanh", "nanmean", "polygamma", "nn.functional.batch_norm", "nn.functional.rrelu", "lerp",
    "nn.functional.multi_margin_loss", "fft.rfft", "torch.ops.aten._flash_attention_forward",
}  # fmt: skip

LARGE_INSIDE = {"logaddexp", "pow"}  # their gradients pass through numbers beyond complex32


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.zeros_like(x), x)


def nanmean(x: torch.Tensor, dim=None, keepdim: bool = False, **_: object) -> torch.Tensor:
    count = x.isnan().logical_not().sum(dim, keepdim)
    return without_nan(x).sum(dim, keepdim) / count


def nansum(x: torch.Tensor, dim=None, keepdim: bool = False, **_: object) -> torch.Tensor:
    return without_nan(x).sum(dim, keepdim)


TRUTHS = {"nanmean": nanmean, "nansum": nansum}  # of complex numbers, which the CPU refuses

SENTENCES = (
    "Unsupported dtype",  # torch's own, of transforms in half precision away from CUDA
    "the device emuchip has no",
    "the device emuchip holds dense tensors only",
)


def pairs() -> Iterator[tuple]:
    for op in op_db:
        if "EVERY_PAIR" not in os.environ and op.name not in EVERY_DAY:
            continue
        for backward in (False, True) if op.supports_autograd else (False,):
            supported = op.supported_backward_dtypes if backward else op.supported_dtypes
            for dtype in sorted(supported("cuda") - supported("cpu"), key=str):
                yield op, dtype, backward


def name_of(value: object) -> str | None:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool):
        return "backward" if value else "forward"
    return getattr(value, "full_name", None) or getattr(value, "name", None)


def cast(values: object, wide: torch.dtype, dtype: torch.dtype, device: str) -> object:
    def one(x: object) -> object:
        if isinstance(x, torch.Tensor):
            narrow = x.detach().to(dtype) if x.dtype == wide else x.detach()
            return narrow.to(device).requires_grad_(x.requires_grad)
        return dtype if x is wide else x

    return tree_map(one, values)


def tensors(values: object) -> list[torch.Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def call(op, arguments: tuple, backward: bool) -> list[torch.Tensor]:
    """Its results, and with `backward` the gradients of the sum of their absolute values."""
    torch.manual_seed(0)
    first, args, kwargs = arguments
    results = tensors(op(first, *args, **kwargs))
    if backward:
        leaves = [x for x in tensors(arguments) if x.requires_grad]
        outputs = [x for x in results if x.requires_grad]
        ones = [torch.ones_like(x) for x in outputs]
        results += [g for g in torch.autograd.grad(outputs, leaves, ones) if g is not None]
    return results


def as_numbers(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().cpu()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def assert_close(op, result: torch.Tensor, right: torch.Tensor, backward: bool) -> None:
    is_exact = not (result.is_floating_point() or result.is_complex())
    eps = 0 if is_exact else torch.finfo(result.dtype).eps
    found, wanted = as_numbers(result), as_numbers(right.to(result.dtype))
    if result.dtype == torch.complex32:  # which ends at 65504: infinite parts make the other NaN
        seen = torch.isfinite(wanted)
        if op.name in LARGE_INSIDE and backward:
            seen &= torch.isfinite(found)
        found, wanted = found[seen], wanted[seen]
    largest = wanted.abs().nan_to_num(posinf=1).max().item() if wanted.numel() else 0
    limit = 16 * eps * max(1, largest)  # sums of products cancel
    torch.testing.assert_close(found, wanted, rtol=16 * eps, atol=limit, equal_nan=True)


@pytest.mark.parametrize(("op", "dtype", "backward"), pairs(), ids=name_of)
def test_what_cuda_computes_is_computed_or_refused_in_a_sentence(op, dtype, backward) -> None:
    warnings.simplefilter("ignore")
    wide = WIDER.get(dtype, dtype)
    samples, compared = op.sample_inputs("cpu", wide, requires_grad=backward), 0
    for sample, _ in zip(samples, range(12), strict=False):
        given = (sample.input, sample.args, sample.kwargs)
        narrow = cast(given, wide, dtype, "cpu")
        right_dtype = WIDER.get(dtype, dtype if dtype.is_complex else torch.float64)
        try:
            truth = TRUTHS.get(op.name, op)
            expected = call(truth, cast(narrow, dtype, right_dtype, "cpu"), backward)
        except (RuntimeError, NotImplementedError):
            expected = []
        try:
            results = call(op, cast(narrow, dtype, dtype, "device"), backward)
        except (RuntimeError, NotImplementedError) as error:
            if any(sentence in str(error) for sentence in SENTENCES):
                return
            if not expected:
                continue  # the sample is not for this dtype, here or there
            raise
        if not expected:
            continue
        assert len(results) == len(expected)
        for result, right in zip(results, expected, strict=True):
            assert result.device in (ditorch.device, torch.device("cpu"))
            if op.name == "nn.functional.rrelu" and sample.kwargs.get("training"):
                continue  # random
            assert_close(op, result, right, backward)
        compared += 1
    assert compared, "no sample could be compared"
