"""Elementwise operators are the chip's own and agree with the CPU, whatever dtype and layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ditorch

FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

Operator = Callable[[Tensor, Tensor], Tensor]

ARITHMETIC: dict[str, Operator] = {
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "scalar": lambda x, y: (x + 2) * 3 - 1,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: x.clamp(1, 3).clamp(min=2),
    "neg": lambda x, y: -x,
    "compare": lambda x, y: (x < y) | (x >= y) & (x != 2) & ~(y == 1) | (x > 1),
    "where": lambda x, y: torch.where(x <= y, x, y),
    "masked_fill": lambda x, y: x.masked_fill(x > y, 4),
    "in place": lambda x, y: x.clone().mul_(y).add_(1),
    "fill": lambda x, y: torch.zeros_like(x).fill_(3) + torch.ones_like(x),
    "relu": lambda x, y: torch.relu(x) + F.relu_(x.clone()),
}
FUNCTIONS: dict[str, Operator] = {
    "div": lambda x, y: x / y,
    "sqrt": lambda x, y: x.abs().sqrt(),
    "rsqrt": lambda x, y: x.abs().rsqrt(),
    "reciprocal": lambda x, y: x.reciprocal(),
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.abs().log(),
    "sin": lambda x, y: x.sin() + y.cos(),
    "tanh": lambda x, y: x.tanh(),
    "erf": lambda x, y: x.erf(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "pow": lambda x, y: x**1 + x**2 + x**3 + x.abs() ** 0.5 + x.abs() ** 1.7,
    "powers": lambda x, y: x.abs() ** y,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25) + torch.lerp(x, y, 0.75),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x) + F.gelu(x, approximate="tanh"),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "with gaps": lambda x: x.as_strided((5, 5, 7), (2, 30, 4)),
    "one row for all": lambda x: x[:1].expand(5, -1, -1),
    "one element": lambda x: x[0, 0, 0],
}


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        drawn = torch.randn(5, 5, 7, generator=generator, dtype=torch.float64)
        return (drawn + drawn.sign() * 0.25).to(dtype)
    return torch.randint(0, 5, (5, 5, 7), generator=generator).to(dtype)


def check(operator: Operator, x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    on_chip = [value.to("device") for value in (x, y)]
    ditorch.reset_fallback_counts()
    found = operator(*on_chip)
    assert ditorch.fallback_counts() == {}
    expected = operator(x, y)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if dtype.is_floating_point and found.dtype.is_floating_point:
        slack = 8 * torch.finfo(dtype).eps  # both round each step to the dtype
        torch.testing.assert_close(found.cpu(), expected, rtol=slack, atol=slack)
    else:
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str, dtype: torch.dtype) -> None:
    check(ARITHMETIC[name], numbers(dtype, 1), numbers(dtype, 2), dtype)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_a_number_is_compared_in_the_tensors_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.7, 44, 100, 2048], dtype=torch.float64)
    x = (x if dtype.is_floating_point else x.clamp(max=torch.iinfo(dtype).max)).to(dtype)
    plain = [0.1, 0.7, 2049.0, 1e6] if dtype.is_floating_point else [44, 300, -1]
    others: list[float | Tensor] = [*plain, *(torch.tensor(number) for number in plain)]
    if dtype.is_floating_point:
        others.append(torch.tensor([2049]))
    for operator in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge):
        for other in others:
            to_chip = other.to("device") if isinstance(other, Tensor) else other
            found = operator(x.to("device"), to_chip)
            assert torch.equal(found.cpu(), operator(x, other)), (operator, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_comparison_with_a_number_is_the_chips_own(dtype: torch.dtype) -> None:
    x = numbers(dtype, 1)
    check(lambda x, y: (x < 0.1) | (x >= 0.7) & (x != 0.3), x, x, dtype)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: torch.dtype) -> None:
    check(FUNCTIONS[name], numbers(dtype, 1), numbers(dtype, 2), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_layouts_that_broadcast(layout: str, other: str) -> None:
    x, y = numbers(torch.float32, 1), numbers(torch.float32, 2)
    check(lambda a, b: LAYOUTS[layout](a) * LAYOUTS[other](b), x, y, torch.float32)


@pytest.mark.parametrize("to", FLOATING + INTEGERS + [torch.bool])
@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_casts_and_strided_copies(dtype: torch.dtype, to: torch.dtype) -> None:
    x = numbers(dtype, 1)
    if not to.is_floating_point:
        x = x.abs()  # what a negative number becomes in an unsigned dtype, C leaves open
    ditorch.reset_fallback_counts()
    found = x.to("device").transpose(0, 2)[1:].to(to)
    assert ditorch.fallback_counts() == {}
    assert torch.equal(found.cpu(), x.transpose(0, 2)[1:].to(to))


BITS: dict[str, Operator] = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x, y: ~x,
    "numbers": lambda x, y: (x & 5) ^ 3 | 64,
    "shifts": lambda x, y: (x >> 3) + (y << 5) + torch.bitwise_right_shift(x, 1),
    "in place": lambda x, y: x.clone().__irshift__(2).__ilshift__(1).bitwise_xor_(y),
}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", BITS)
def test_bits(name: str, dtype: torch.dtype) -> None:
    limits, generator = torch.iinfo(dtype), torch.Generator().manual_seed(1)
    x, y = (
        torch.randint(limits.min, limits.max, (5, 7), generator=generator, dtype=dtype)
        for _ in range(2)
    )
    check(BITS[name], x, y, dtype)
    found, expected = (
        BITS[name](a.t(), b.t()) for a, b in ((x.to("device"), y.to("device")), (x, y))
    )
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("name", ["and", "or", "xor", "not"])
def test_truth_values(name: str) -> None:
    x, y = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(BITS[name], x, y, torch.bool)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_whole_parts(dtype: torch.dtype) -> None:
    x = torch.arange(-9 if dtype.is_signed else 0, 100).to(dtype)
    for divisor in (1, 2, 7, -1, -3) if dtype.is_signed else (1, 2, 7):
        ditorch.reset_fallback_counts()
        on_chip = x.to("device")
        found = on_chip // divisor
        assert on_chip.clone().floor_divide_(divisor).equal(found)
        assert ditorch.fallback_counts().keys() <= {"equal"}
        assert torch.equal(found.cpu(), x // divisor)


def test_a_product_with_a_number_beyond_float32_is_exact_in_integers() -> None:
    x = torch.tensor([2**53 + 1, -3], device="device")
    assert (x * 1 + 2**40).tolist() == [2**53 + 1 + 2**40, 2**40 - 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_to_a_floating_power_are_floating(dtype: torch.dtype) -> None:
    x = torch.tensor([3_000_000, 2**30, -7], dtype=dtype)
    for exponent in (2.0, 3.0, 2, 3):
        found, expected = x.to("device") ** exponent, x**exponent
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.cpu(), expected)


WRITES: dict[str, Callable[[Tensor, float], object]] = {
    "full": lambda x, value: torch.full_like(x, value),
    "fill": lambda x, value: x.fill_(value),
    "masked_fill": lambda x, value: x.masked_fill_(x == 0, value),
    "masked_fill by a tensor": lambda x, value: x.masked_fill_(x == 0, torch.tensor(value)),
    "scatter": lambda x, value: x.scatter_(
        0, torch.zeros(1, dtype=torch.int64).to(x.device), value
    ),
    "item": lambda x, value: x.__setitem__(0, value),
    "clamp": lambda x, value: x.clamp(min=value),
    "factor": lambda x, value: torch.add(x, x, alpha=value),
}
VALUES = [
    (torch.int8, 300), (torch.uint8, -1), (torch.uint8, 256.0), (torch.int32, 2**31),
    (torch.int64, 1e19), (torch.int16, math.nan), (torch.bool, 0.2), (torch.float16, 1e6),
    (torch.float16, -1e9), (torch.float16, 65504.0), (torch.float16, -math.inf),
    (torch.bfloat16, 1e39), (torch.float32, 1e39), (torch.float64, 1e39),
]  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_number_that_does_not_fit_is_refused_as_by_the_cpu(name: str) -> None:
    def outcome(device: str, dtype: torch.dtype, value: float) -> str:
        x = torch.zeros(2, dtype=dtype, device=device)
        try:
            written = WRITES[name](x, value)
        except RuntimeError as error:
            return str(error)
        return str((written if isinstance(written, Tensor) else x).tolist())

    for dtype, value in VALUES:
        assert outcome("device", dtype, value) == outcome("cpu", dtype, value), (dtype, value)


def test_fractions_that_fill_truth_values_are_true() -> None:
    x = torch.zeros(2, dtype=torch.bool, device="device")
    assert x.fill_(torch.tensor(0.2, device="device")).tolist() == [True, True]


def test_relu_refuses_truth_values() -> None:
    for relu in (torch.relu, torch.relu_):
        with pytest.raises(RuntimeError, match="Boolean inputs not supported for relu"):
            relu(torch.tensor([True], device="device"))


def test_nothing_is_written_where_memory_overlaps_in_part() -> None:
    x = torch.arange(8.0, device="device")
    with pytest.raises(RuntimeError, match=r"overlap|memory location"):
        torch.add(x[:-1], 1, out=x[1:])
    with pytest.raises(RuntimeError, match="memory location"):
        torch.ones(1, device="device").expand(4).mul_(2)


def test_nan_is_kept() -> None:
    x = torch.tensor([float("nan"), 1.0, float("inf")], device="device")
    for result in (x.clamp(0, 2), x.relu(), x.sigmoid(), F.silu(x), torch.maximum(x, -x)):
        assert result.isnan().tolist() == [True, False, False]
    assert (x == x).tolist() == [False, True, True]
    assert (x != x).tolist() == [True, False, False]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_steps_on_the_chip(optimizer: type, foreach: bool) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        values = [torch.randn(shape) for shape in ((4, 3), (7,), (1,))]
        parameters = [value.to(device).requires_grad_() for value in values]
        made = optimizer(parameters, lr=0.1, weight_decay=0.01, foreach=foreach)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.cos(parameter.detach() + step)
            if step == 1:
                ditorch.reset_fallback_counts()
            made.step()
        return [parameter.detach().cpu() for parameter in parameters]

    expected, found = train("cpu"), train("device")
    assert ditorch.fallback_counts() == {}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_sign_of_zero_is_kept() -> None:
    zero = torch.full((33,), -0.0, device="device")
    for function in (torch.tanh, torch.erf, F.gelu, F.silu):
        assert function(zero).cpu().signbit().all()
