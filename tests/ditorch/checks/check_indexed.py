"""What goes by indices and by order agrees with the CPU for shapes and strides drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ditorch

CASES = 12
FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATING, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


def laid_out(value: Tensor, draw: random.Random) -> tuple[Tensor, Tensor]:
    """The same values here and on the device, in one layout: permuted and with gaps."""
    order = draw.sample(range(value.dim()), value.dim())
    gaps = [draw.choice([1, 1, 2]) for _ in order]
    sizes = [value.size(d) * gap for d, gap in zip(order, gaps, strict=True)]
    back = [order.index(d) for d in range(value.dim())]
    both = []
    for device in ("cpu", "device"):
        memory = torch.zeros(sizes, dtype=value.dtype).to(device)
        seen = memory[tuple(slice(None, None, gap) for gap in gaps)].permute(back)
        both.append(seen.copy_(value))
    return both[0], both[1]


def values(draw: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Eighths, of which a few add up without rounding in every dtype; often the same ones."""
    count = torch.Size(shape).numel()
    eighths = torch.tensor([draw.randint(-8, 8) for _ in range(count)], dtype=torch.float64)
    return (eighths.view(shape) / (8 if dtype.is_floating_point else 1)).to(dtype)


def drawn_index(
    draw: random.Random, shape: list[int], below: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Some are one index for a whole dimension."""
    own = [1 if draw.random() < 0.2 else size for size in shape]
    numbers = [draw.randrange(below) for _ in range(torch.Size(own).numel())]
    here, there = laid_out(torch.tensor(numbers, dtype=dtype).view(own), draw)
    return here.expand(shape), there.expand(shape)


def own(operator: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    ditorch.reset_fallback_counts()
    found = operator(*arguments, **named)
    assert ditorch.fallback_counts() == {}
    return found


def agree(operator: Callable[..., Tensor], here: list[Tensor], there: list[Tensor]) -> None:
    found, expected = own(operator, *there), operator(*here)
    assert torch.equal(found.cpu(), expected), [(one.shape, one.stride()) for one in here]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_are_found_added_and_replaced(dtype: torch.dtype) -> None:
    for seed in range(CASES):
        draw = random.Random(seed)
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 5))]
        dim = draw.randrange(len(shape))
        smaller = [draw.randint(1, size) for size in shape]
        smaller[dim] = draw.randint(1, 9)
        table, table_there = laid_out(values(draw, shape, dtype), draw)
        source, source_there = laid_out(values(draw, smaller, dtype), draw)
        index, index_there = drawn_index(draw, smaller, shape[dim], torch.int64)
        agree(lambda t, i, d=dim: t.gather(d, i), [table, index], [table_there, index_there])
        if dtype.is_floating_point:
            agree(
                lambda t, i, s, d=dim: t.scatter_add_(d, i, s),
                [table, index, source],
                [table_there, index_there, source_there],
            )
        smaller[dim] = min(smaller[dim], shape[dim])
        source, source_there = (one.narrow(dim, 0, smaller[dim]) for one in (source, source_there))
        places = torch.tensor(draw.sample(range(shape[dim]), smaller[dim]))
        index = places.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(smaller)
        agree(
            lambda t, i, s, d=dim: t.scatter_(d, i, s),
            [table, index, source],
            [table_there, index.to("device"), source_there],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_many_name_is_the_same_sum_every_time(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    index = torch.randint(0, 5, (700,)).pow(2) % 7
    source = torch.randn(700, 37, dtype=dtype)
    expected = torch.zeros(7, 37, dtype=torch.float64).index_add_(0, index, source.double())
    rows = index[:, None].expand(-1, 37).to("device")
    zeros = torch.zeros(7, 37, dtype=dtype, device="device")
    found = own(lambda: zeros.scatter_add(0, rows, source.to("device")))
    torch.testing.assert_close(found.cpu(), expected.to(dtype), atol=1e-5, rtol=8e-3)
    for _ in range(3):
        assert torch.equal(zeros.scatter_add(0, rows, source.to("device")).cpu(), found.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_put_in_order(dtype: torch.dtype) -> None:
    for seed, (rows, length) in enumerate([(1, 1), (40, 5), (9, 33), (3, 1000), (2, 4097)]):
        draw = random.Random(seed)
        x = values(draw, [rows, length], dtype)
        if dtype.is_floating_point:  # minus zero is no less than zero
            x[0, length // 2], x[-1, length // 3], x[-1, 0] = float("nan"), float("inf"), -0.0
        there = x.to("device")
        for descending in (False, True):
            expected = x.sort(dim=-1, stable=True, descending=descending)
            found = [own(torch.sort, there, stable=True, dim=-1, descending=descending)]
            if dtype != torch.bool:  # torch has no such topk
                found.append(own(torch.topk, there, draw.randint(1, length), largest=descending))
            for values_there, places in found:
                kept = values_there.size(1)
                assert torch.equal(places.cpu(), expected.indices[:, :kept])
                wanted = expected.values[:, :kept].nan_to_num(9)
                assert torch.equal(values_there.cpu().nan_to_num(9), wanted)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_sums_up_to_each_element(dtype: torch.dtype) -> None:
    for shape, dim in [((5,), 0), ((3, 4, 5), 1), ((2, 9000), 1), ((5000, 3), 0), ((2, 700, 2), 1)]:
        x = values(random.Random(len(shape)), list(shape), dtype)
        if dtype.is_floating_point:
            x = (x.double() * (torch.arange(x.numel()).view(shape) % 97 == 0)).to(dtype)
        agree(lambda x, d=dim: x.cumsum(d, dtype=x.dtype), [x], [x.to("device")])
