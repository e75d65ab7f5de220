"""An emulated chip is charged for the pairs of a query and a key that attention sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ditorch
from ditorch.chips import load_chip

CHIP = load_chip("c-mini")


def busy_s(run: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    ditorch.pacing_reset()
    run()
    torch.accelerator.synchronize()
    pacing = ditorch.pacing()
    assert pacing is not None
    return pacing.busy_s


def expected_s(flops: float, *tensors: Tensor) -> float:
    computing_s = flops / (CHIP.compute.float32_flops * CHIP.compute.efficiency)
    moved_bytes = sum(tensor.nbytes for tensor in tensors)
    return CHIP.compute.launch_s + max(computing_s, moved_bytes / CHIP.memory.bandwidth_bytes_per_s)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "value_size"),
    [(200, 300, False, 24), (300, 200, True, 16), (200, 300, True, 8)],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_of_whole_sequences(
    queries: int, keys: int, causal: bool, value_size: int, dropout: float
) -> None:
    """What is done to a score beside its product, as to drop its weight, counts nothing."""
    heads, size = 8, 16  # of 2 sequences
    query = torch.zeros(2, 4, queries, size, device="device", requires_grad=True)
    key = torch.zeros(2, 2, keys, size, device="device", requires_grad=True)
    value = torch.zeros(2, 2, keys, value_size, device="device", requires_grad=True)
    found: list[Tensor] = []

    def forward() -> None:
        found.append(
            F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=causal, enable_gqa=True
            )
        )

    forward_s = busy_s(forward)
    (out,) = found
    gradient, sums = torch.zeros_like(out), torch.zeros(heads, queries)
    backward_s = busy_s(lambda: out.backward(gradient))
    pairs = heads * sum(min(i + 1, keys) if causal else keys for i in range(queries))
    given = query, key, value, out, sums
    assert forward_s == pytest.approx(expected_s(2 * pairs * (size + value_size), *given), rel=1e-5)
    flops = 2 * pairs * (3 * size + 2 * value_size)
    assert backward_s == pytest.approx(
        expected_s(flops, *given, gradient, query, key, value), rel=1e-5
    )


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_of_windows_and_documents(
    window: int | None, documents: bool, soft_cap: float | None
) -> None:
    """Documents count as if they were as long as the longest may be, and a soft cap nothing."""
    flash, options = torch.ops.aten._flash_attention_forward, {}
    if soft_cap is not None:
        flash, options = torch.ops.ditorch._flash_attention_forward, {"soft_cap": soft_cap}
    length, heads, size = 300, 2, 16
    ends = None
    query = torch.zeros(4, length, heads, size, device="device")
    if documents:
        query = query.flatten(0, 1)
        ends = torch.tensor([0, 5, 400, 1200], dtype=torch.int32).to("device")
    pairs = 4 * heads * sum(min(i + 1, window or length) for i in range(length))
    found_s = busy_s(
        lambda: flash(
            *(query, query, query, ends, ends, length, length, 0.0, True, False),
            scale=None,
            window_size_left=None if window is None else window - 1,
            window_size_right=0,
            **options,
        )
    )
    touched = [query, query, torch.zeros(4 * length * heads)]
    touched += [ends] if ends is not None else []
    assert found_s == pytest.approx(expected_s(2 * pairs * 2 * size, *touched), rel=1e-5)
