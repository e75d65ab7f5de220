"""Softmaxes, norms, sums and their gradients against float64 on the CPU, in the dtype DTYPE."""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

import ditorch

dtype = getattr(torch, os.environ["DTYPE"])
allowed = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1.6e-2, "float16": 2e-3}
EXPECTED_KERNELS = {
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "sum", "mean",
}  # fmt: skip


def agree(what: str, there: torch.Tensor, expected: torch.Tensor) -> None:
    assert there.dtype == dtype, what
    error = (there.cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error.item() < allowed[os.environ["DTYPE"]], (what, tuple(expected.shape), error)


def compare(
    name: str, function: Callable[..., torch.Tensor], *inputs: torch.Tensor, with_grads: bool = True
) -> None:
    there = [x.to("device").requires_grad_(with_grads) for x in inputs]
    here = [x.to(torch.float64, copy=True).requires_grad_(with_grads) for x in inputs]
    ours, expected = function(*there), function(*here)
    agree(name, ours.detach(), expected.detach())
    if with_grads:
        grad = torch.randn(expected.shape, dtype=dtype)
        ours.backward(grad.to("device"))
        expected.backward(grad.double())
        for i, (x, y) in enumerate(zip(there, here, strict=True)):
            agree(f"{name}, gradient {i}", x.grad, y.grad)


torch.manual_seed(0)
for shape in ((3, 7), (2, 3, 64), (5, 100), (200, 33), (1, 5000)):
    x = torch.randn(shape, dtype=dtype) * 2
    compare("softmax", lambda x: x.softmax(-1), x)
    compare("log_softmax", lambda x: x.log_softmax(-1), x)
    weight, bias = (torch.randn(shape[-1], dtype=dtype) for _ in range(2))
    compare(
        "layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5), x, weight, bias
    )
    compare("layer_norm alone", lambda x: F.layer_norm(x, x.shape[-1:]), x)
    compare("rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5), x, weight)
    compare("rms_norm alone", lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5), x)
x = torch.rand(4, 300, 37, dtype=dtype)
for dims in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)):
    compare(f"sum of {dims}", lambda x, dims=dims: x.sum(dims), x, with_grads=False)
    compare(f"mean of {dims}", lambda x, dims=dims: x.mean(dims), x, with_grads=False)
for shape in ((100_003,), (20_000, 3), (9000, 40)):
    x = torch.rand(shape, dtype=dtype)
    compare(f"sum of {shape}", lambda x: x.mean(0), x, with_grads=False)

rows = torch.tensor([[float("-inf"), 1, 2], [float("nan"), 1, 2], [float("-inf")] * 3], dtype=dtype)
assert torch.equal(rows.to("device").softmax(-1).isnan().cpu(), rows.softmax(-1).isnan())
missing = EXPECTED_KERNELS - {name for name, runs in ditorch.kernel_counts().items() if runs}
fallbacks = {name for name, runs in ditorch.fallback_counts().items() if runs}
assert not missing and not EXPECTED_KERNELS & fallbacks, (missing, fallbacks)
print("done")
