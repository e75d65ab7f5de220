"""Operators on indices, norms, losses of classes and what joins tensors are the chip's own.

They agree with the CPU, whatever dtype and layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ditorch

FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def indices(*shape: int, below: int, seed: int = 2) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def to_chip(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("device")
    return [to_chip(one) for one in value] if isinstance(value, list) else value


def check(operator: Callable[..., Any], *arguments: Any) -> None:
    on_chip = to_chip(list(arguments))
    ditorch.reset_fallback_counts()
    found = operator(*on_chip)
    assert ditorch.fallback_counts() == {}
    expected = operator(*arguments)
    if isinstance(expected, tuple):
        for one, wanted in zip(found, expected, strict=True):
            assert_same(one, wanted)
    else:
        assert_same(found, expected)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.stride() == expected.stride()
    if expected.dtype.is_floating_point:
        slack = 8 * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(found.cpu(), expected, rtol=slack, atol=slack, equal_nan=True)
    else:
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_rows_and_elements_are_found_by_index(dtype: torch.dtype) -> None:
    table, rows = drawn(9, 7, dtype=dtype), indices(11, below=9)
    check(lambda t, i: t.index_select(0, i), table, rows)
    check(lambda t, i: t.index_select(-1, i), table, rows % 7)
    check(lambda t, i: t.t().index_select(1, i.int()), table, rows)
    check(lambda t, i: t[2:, ::2].index_select(0, i), table, rows % 7)
    check(lambda t, i: t.gather(1, i), table, indices(9, 3, below=7))
    check(lambda t, i: t.gather(0, i), table, indices(4, 5, below=9))
    check(lambda t, i: F.embedding(i, t), table, indices(2, 3, below=9))


@pytest.mark.parametrize("dtype", FLOATING)
def test_gradients_are_summed_where_indices_repeat(dtype: torch.dtype) -> None:
    def of_embedding(table: Tensor, index: Tensor, grad: Tensor, padding: int | None) -> Tensor:
        table = table.detach().requires_grad_()
        F.embedding(index, table, padding_idx=padding).backward(grad)
        assert table.grad is not None
        return table.grad

    table, index = drawn(5, 6, dtype=dtype), indices(2, 7, below=5)
    grad = drawn(2, 7, 6, dtype=dtype, seed=3)
    check(of_embedding, table, index, grad.double().mul(8).round().div(8).to(dtype), None)
    check(of_embedding, table, index, grad.double().mul(8).round().div(8).to(dtype), 3)
    whole = grad[0].double().mul(8).round().div(8).to(dtype)  # sums are exact in every dtype
    check(lambda t, i, g: t.scatter_add(0, i, g), table * 0, indices(4, 6, below=5), whole)
    check(lambda t, i, g: t.scatter_add(1, i, g), table * 0, indices(5, 3, below=6), whole)


def test_many_small_numbers_are_summed_wider_than_they_are_stored() -> None:
    table = torch.zeros(1, 3, dtype=torch.bfloat16, device="device")
    index = torch.zeros(1000, 3, dtype=torch.int64, device="device")
    ones = torch.ones(1000, 3, dtype=torch.bfloat16, device="device")
    assert table.scatter_add(0, index, ones).tolist() == [[1000.0] * 3]  # by bfloat16 alone: 256


@pytest.mark.parametrize("dtype", FLOATING)
def test_rows_are_added_where_an_index_says(dtype: torch.dtype) -> None:
    table, index = drawn(5, 6, dtype=dtype), indices(7, below=5)
    rows = drawn(7, 6, dtype=dtype, seed=3).double().mul(8).round().div(8).to(dtype)
    check(lambda t, i, r: (t * 0).index_add_(0, i, r), table, index, rows)
    check(lambda t, i, r: (t * 0).t().index_add(1, i.int(), r.t()), table, index, rows)
    out = table * 0
    check(lambda t, i, r, o: torch.index_add(t, 0, i, r, out=o), table, index[:0], rows[:0], out)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_losses_of_classes(dtype: torch.dtype, reduction: str) -> None:
    def loss(chances: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(chances, target, reduction=reduction)

    def gradient(chances: Tensor, target: Tensor) -> Tensor:
        chances = chances.detach().requires_grad_()
        loss(chances, target).backward()
        assert chances.grad is not None
        return chances.grad

    chances, target = drawn(6, 10, dtype=dtype), indices(6, below=10)
    for ignored in ([], [0, 4], range(6)):
        some = target.clone()
        some[list(ignored)] = -100
        check(loss, chances, some)
        check(gradient, chances, some)


@pytest.mark.parametrize("dtype", FLOATING)
def test_norms(dtype: torch.dtype) -> None:
    x = drawn(4, 5, 6, dtype=dtype)
    check(lambda x: torch.linalg.vector_norm(x), x)
    check(lambda x: torch.linalg.vector_norm(x, dim=(1, 2)), x)
    check(lambda x: torch.linalg.vector_norm(x.transpose(0, 2), dim=0, keepdim=True), x)
    check(lambda x: torch.stack(torch._foreach_norm([x, x[0], x[0, 0, 0]])), x)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_tensors_are_joined(dtype: torch.dtype) -> None:
    x, y = drawn(2, 3, 4, dtype=dtype), drawn(2, 1, 4, dtype=dtype, seed=4)
    check(lambda x, y: torch.cat((x, y, x), 1), x, y)
    check(lambda x, y: torch.cat((x.transpose(0, 2), y.transpose(0, 2)), -2), x, y)
    check(lambda x, y: torch.cat((x, x.new_empty(0), y.float()), 1), x, y)
    check(lambda x: torch.stack((x[..., ::2], x[..., 1::2]), -1), x)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
@pytest.mark.parametrize("shift", [0, 1, -2, 9])
def test_places_are_turned(dtype: torch.dtype, shift: int) -> None:
    x = drawn(3, 4, dtype=dtype)
    check(lambda x: x.roll(shift, 1), x)
    check(lambda x: x.t().roll(shift, -2), x)
    check(lambda x: x.expand(2, 5, 3, 4).transpose(1, 2).roll(shift, -1), x)


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS[:-1]])
def test_ranges(dtype: torch.dtype) -> None:
    for limits in ((7,), (3, 9), (2, 11, 3)):
        ditorch.reset_fallback_counts()
        found = torch.arange(*limits, dtype=dtype, device="device")
        assert ditorch.fallback_counts() == {}
        assert torch.equal(found.cpu(), torch.arange(*limits, dtype=dtype))
    if dtype.is_floating_point:
        check_range(dtype)


def test_ranges_of_large_integers() -> None:
    for limits in ((2**60, 2**60 + 300), (2**60 + 300, 2**60, -7), (0, 2**53, 2**43 + 1)):
        found = torch.arange(*limits, device="device")
        assert torch.equal(found.cpu(), torch.arange(*limits))


def check_range(dtype: torch.dtype) -> None:
    """The CPU takes some of the sums in the dtype itself."""
    many = torch.arange(0.0, 100.0, 0.1, dtype=dtype, device="device")
    expected = torch.arange(0.0, 100.0, 0.1, dtype=dtype)
    torch.testing.assert_close(many.cpu(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int64, torch.bool])
@pytest.mark.parametrize("diagonal", [-2, 0, 3])
def test_triangles(dtype: torch.dtype, diagonal: int) -> None:
    x = drawn(2, 5, 4, dtype=dtype)
    check(lambda x: x.tril(diagonal), x)
    check(lambda x: x.transpose(1, 2).triu(diagonal), x)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int32, torch.bool])
def test_whether_all_or_any_are_true(dtype: torch.dtype) -> None:
    x = drawn(3, 4, 5, dtype=dtype) * drawn(3, 4, 5, dtype=torch.bool).to(dtype)
    for one in (x, torch.zeros_like(x), torch.ones_like(x)):
        check(lambda x: x.all(), one)
        check(lambda x: x.any(), one)
        check(lambda x: x.all(1), one)
        check(lambda x: x.any(-1, keepdim=True), one)
        check(lambda x: x.all(0), one[0, 0, 0])
        check(lambda x: x.any(-1, keepdim=True), one[0, 0, 0])


def test_infinities_are_told() -> None:
    x = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")])
    check(torch.isneginf, x)
    check(torch.isposinf, x)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_what_a_tensor_of_places_selects(dtype: torch.dtype) -> None:
    table, places = drawn(5, 6, 7, dtype=dtype), indices(3, 4, below=5) - 2  # some from the end
    check(lambda t, i: t[i], table, places)
    check(lambda t, i: t[:, i.int()], table, places)
    check(lambda t, i: t.transpose(0, 2)[:, :, i], table, places)
    check(lambda t, i: t[0, 0][i], table, places[0])


def test_places_on_the_host_select_on_the_chip() -> None:
    table, places = drawn(5, 3), torch.tensor([4, -5, 0])
    assert torch.equal(table.to("device")[places].cpu(), table[places])


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_what_a_tensor_of_places_is_given(dtype: torch.dtype) -> None:
    def put(table: Tensor, index: Tensor, values: Tensor) -> Tensor:
        table = table.clone()
        table[:, index] = values
        return table

    table, values = drawn(5, 6, 7, dtype=dtype), drawn(5, 2, 2, 7, dtype=dtype, seed=5)
    check(put, table, torch.tensor([[0, -1], [3, 1]]), values)
    check(put, table, torch.tensor([2, 4]), values[0, 0, 0])
    places = torch.tensor([[2, 0, 1], [1, 2, 0]])
    check(lambda t, i, v: t.scatter(1, i, v), table[0], places, values[0, :, 0])
    check(lambda t, i: t.scatter(0, i, 1), table[0], places)


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_gradient_of_a_selection(dtype: torch.dtype) -> None:
    def gradient(table: Tensor, index: Tensor, grad: Tensor) -> Tensor:
        table = table.detach().requires_grad_()
        table[index].backward(grad)
        assert table.grad is not None
        return table.grad

    grad = drawn(9, 4, dtype=dtype).double().mul(8).round().div(8).to(dtype)  # sums are exact
    check(gradient, drawn(5, 4, dtype=dtype), indices(9, below=5) - 1, grad)


def with_ties(*shape: int, dtype: torch.dtype) -> Tensor:
    x = drawn(*shape, dtype=torch.float32) * 4
    x = x.abs() if dtype == torch.uint8 else x
    x = x.round().to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[[1, -2]] = float("nan")
        x.view(-1)[4] = -float("inf")
    return x


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_order(dtype: torch.dtype) -> None:
    x = with_ties(3, 40, dtype=dtype)
    for descending in (False, True):
        check(lambda x, d=descending: tuple(x.sort(stable=True, descending=d)), x)
        check(lambda x, d=descending: tuple(x.t()[:7].t().sort(stable=True, descending=d)), x)
        if dtype != torch.bool:
            check(lambda x, d=descending: x.topk(5, largest=d).values, x)
            check(lambda x, d=descending: x.gather(1, x.topk(6, largest=d).indices), x)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_the_largest(dtype: torch.dtype) -> None:
    x = with_ties(3, 4, 5, dtype=dtype)
    check(lambda x: x.amax(-1), x)
    check(lambda x: x.amax((0, 2), keepdim=True), x)
    check(lambda x: x.max(), x)
    check(lambda x: x[0, 0, 0].amax(-1), x)
    check(lambda x: tuple(x.transpose(0, 1).max(1)), x)
    check(lambda x: tuple(x.max(0, keepdim=True)), x)
    if dtype != torch.bool:
        check(lambda x: x.argmax(), x)
        check(lambda x: x.argmax(1), x)


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_running_sums(dtype: torch.dtype) -> None:
    x = (drawn(4, 5, 6, dtype=dtype).double() * 4).round().to(dtype)
    for dim in (0, 1, -1):
        check(lambda x, dim=dim: x.cumsum(dim), x)
    check(lambda x: x.transpose(0, 2).cumsum(1, dtype=torch.int32), x)
    if not dtype.is_floating_point and dtype != torch.bool:
        check(lambda x: x.cumsum(0, dtype=x.dtype), torch.full((9, 2), 100, dtype=dtype))


def test_many_small_numbers_are_summed_on_wider_than_they_are_stored() -> None:
    ones = torch.ones(1000, dtype=torch.bfloat16, device="device")
    assert ones.cumsum(0)[-1].item() == 1000.0  # by bfloat16 alone: 256


@pytest.mark.parametrize("dtype", INTEGERS[:-1])
def test_counts(dtype: torch.dtype) -> None:
    x = drawn(50).mul(20).clamp(0 if dtype == torch.uint8 else -128, 100).to(dtype)
    on_chip = x.to("device")
    ditorch.reset_fallback_counts()
    counts = torch.histc(on_chip, bins=5, min=0, max=9)
    assert ditorch.fallback_counts() == {} and counts.dtype == dtype
    places = [min((v * 5) // 9, 4) for v in x.tolist() if 0 <= v <= 9]
    assert counts.tolist() == [places.count(bin) for bin in range(5)]


def test_a_division_by_zero_is_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.ones(3, dtype=torch.int64, device="device") // 0


def test_a_norm_of_another_dtype_is_squared_in_it() -> None:
    x = torch.full((3,), 1e30).to("device")
    assert torch.linalg.vector_norm(x, dtype=torch.float64).item() == pytest.approx(3**0.5 * 1e30)


def test_an_index_out_of_range_is_torchs_own_error() -> None:
    table = torch.zeros(3, 4, device="device")
    for operator, index in (
        (lambda i: F.embedding(i, table), [0, 3]),
        (lambda i: table.index_select(0, i), [-1]),
        (lambda i: table.gather(0, i), [[3]]),
        (lambda i: table[i], [0, 3]),
        (lambda i: table[:, i], [-5]),
        (lambda i: table.index_put_((i,), table.new_ones(4)), [3]),
        (lambda i: F.nll_loss(table, i), [0, 1, 4]),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            operator(torch.tensor(index, device="device"))


def test_what_is_empty_is_filled_by_nobody() -> None:
    ditorch.reset_fallback_counts()
    assert torch.zeros(0, 3, device="device").shape == (0, 3)
    assert ditorch.fallback_counts() == {}


def test_what_has_no_elements_needs_no_kernel() -> None:
    """An expert without tokens is one."""
    none, weight = torch.empty(0, 4), drawn(4, 6)
    check(lambda x, w: x @ w, none, weight)
    check(lambda x, g: x.t() @ g, none, torch.empty(0, 6))
    check(lambda x: F.silu(x).sum(0), none)
    check(lambda x: F.rms_norm(x, (4,)), none)
    check(lambda x: torch.cat((x, x)), none)
    ditorch.reset_fallback_counts()
    assert torch.ones(3, 0, device="device").shape == (3, 0)
    assert ditorch.fallback_counts() == {}


def test_what_is_copied_beside_nothing_is_counted() -> None:
    x, none = drawn(4, 6).to("device"), torch.empty(0, 6, device="device")
    ditorch.reset_fallback_counts()
    torch.index_copy(x, 0, indices(0, below=4).to("device"), none)
    assert ditorch.fallback_counts()
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(torch.empty(3, 0, device="device"), torch.empty(0, 2, device="device").double())


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("worst", [1.0, float("inf"), float("nan")])
def test_gradients_are_unscaled_and_looked_through(dtype: torch.dtype, worst: float) -> None:
    def unscaled(x: Tensor, y: Tensor, found: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
        gradients, found = [x.clone(), y.clone()], found.clone()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return (*gradients, found)

    x, y = drawn(3, 4, dtype=dtype), drawn(9, dtype=dtype, seed=2)
    y[7] = worst
    check(unscaled, x, y, torch.tensor(0.0), torch.tensor(0.125))
    check(unscaled, x, x, torch.tensor(1.0), torch.tensor(0.125))


@pytest.mark.parametrize("scale", [2.0**16, 2.0**127])
@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("steps", [2, 3])
def test_the_scale_shrinks_and_grows(scale: float, found: float, steps: int) -> None:
    def update(scale: Tensor, steps: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        scale, steps = scale.clone(), steps.clone()
        torch._amp_update_scale_(scale, steps, found, 2.0, 0.5, 4)
        return scale, steps

    tensors = torch.tensor(scale), torch.tensor(steps, dtype=torch.int32), torch.tensor(found)
    check(update, *tensors)


@pytest.mark.parametrize("operator", [torch.sum, torch.mean])
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2), (2, 3, 4)])
@pytest.mark.parametrize("given", [(0,), (1, 3)])
def test_a_reduction_gives_its_result_its_sizes(
    operator: Any, shape: tuple[int, ...], given: tuple[int, ...]
) -> None:
    for dim in (0, -1):
        expected, out = torch.empty(given), torch.empty(given, device="device")
        operator(torch.ones(shape), dim, out=expected)
        operator(torch.ones(shape, device="device"), dim, out=out)
        assert_same(out, expected)


def test_dropouts_gradient_of_whole_numbers_is_floating() -> None:
    kept = torch.tensor([True, False])
    arguments = torch.tensor([1, 2]), kept, 2.0
    backward = torch.ops.aten.native_dropout_backward
    assert_same(backward(*(to_chip(each) for each in arguments)), backward(*arguments))
