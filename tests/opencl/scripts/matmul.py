"""Products of every layout against float64 on the CPU, in the dtype that DTYPE names."""

import itertools
import os

import torch

import ditorch

dtype = getattr(torch, os.environ["DTYPE"])
# A result's rounding, and with it the largest error, is relative to the largest element.
allowed = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 8e-3, "float16": 1e-3}
SHAPES = ((1, 5, 7, 9), (1, 100, 70, 130), (3, 33, 65, 50), (1, 1, 200, 300), (1, 257, 300, 31))


def operand(batches: int, rows: int, columns: int, layout: str) -> torch.Tensor:
    if layout == "rows":
        matrices = torch.randn(batches, rows, columns, dtype=dtype)
    elif layout == "columns":
        matrices = torch.randn(batches, columns, rows, dtype=dtype).mT
    else:
        matrices = torch.randn(batches, rows, 2 * columns, dtype=dtype)[..., ::2]
    return matrices if batches > 1 else matrices[0]


def on_device(matrices: torch.Tensor) -> torch.Tensor:
    """Has the operand's own strides there too."""
    there = torch.empty_strided(matrices.shape, matrices.stride(), dtype=dtype, device="device")
    return there.copy_(matrices)


torch.manual_seed(0)
count = 0
for (batches, rows, depth, columns), of_a, of_b in itertools.product(
    SHAPES, ("rows", "columns", "spread"), ("rows", "columns", "spread")
):
    a, b = operand(batches, rows, depth, of_a), operand(batches, depth, columns, of_b)
    expected = a.double() @ b.double()
    result = (on_device(a) @ on_device(b)).cpu().double()
    error = ((result - expected).abs().max() / expected.abs().max()).item()
    assert error < allowed[os.environ["DTYPE"]], (batches, rows, depth, columns, of_a, of_b, error)
    count += 1
kernels = ditorch.kernel_counts()
assert kernels["mm"] + kernels["bmm"] == count
assert not {"mm", "bmm"} & {name for name, runs in ditorch.fallback_counts().items() if runs}
print("done")
