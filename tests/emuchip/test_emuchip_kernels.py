"""The chips' kernels against float64 truth, and against each other in the last bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emuchip_vendor import INVALID, NOT_IMPLEMENTED, OK, Tensor, Vendor

VENDORS = ["a", "b", "c", "d"]
FLOATS = ["float32", "float64", "float16", "bfloat16"]

# Rounding of a result, and what the arithmetic before it may add: relative to the largest value.
# Vendors with fast_exp are off by up to 1e-5 in float32.
TOLERANCE = {"float32": 1e-5, "float64": 1e-14, "float16": 1e-3, "bfloat16": 8e-3}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def assert_close(result: Tensor, truth: np.ndarray, times: float = 1) -> None:
    values = result.values()
    assert values.shape == truth.shape
    assert np.isfinite(values).all()
    error = np.abs(values - truth).max() / np.abs(truth).max()
    assert error <= TOLERANCE[result.dtype] * times, f"relative error {error:.2e}"


def stable_exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max(-1, keepdims=True))


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest, emulate: Any) -> Vendor:
    return emulate(request.param)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (5, 3, 2), (6, 64, 16), (33, 100, 47), (130, 257, 65)]
)
def test_matmul(vendor: Vendor, dtype: str, m: int, k: int, n: int) -> None:
    a, b = Tensor.of(random(m, k), dtype), Tensor.of(random(k, n, seed=1), dtype)
    out = Tensor.empty((m, n), dtype)
    assert vendor.run("matmul", out, a, b) == OK, vendor.error()
    assert_close(out, a.values() @ b.values())


LAYOUTS = {
    "contiguous": lambda x: np.ascontiguousarray(x),
    "transposed": lambda x: np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2),
    "every third column": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "every other row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_matmul_of_any_layout_is_the_same_to_the_bit(
    emulate: Any, dtype: str, a_layout: str, b_layout: str
) -> None:
    vendor = emulate("b")
    a, b = Tensor.of(random(3, 20, 35), dtype), Tensor.of(random(3, 35, 18, seed=1), dtype)
    expected, out = Tensor.empty((3, 20, 18), dtype), Tensor.empty((3, 20, 18), dtype)
    strided_out = Tensor(LAYOUTS[a_layout](out.array), dtype)
    laid_out_a = Tensor(LAYOUTS[a_layout](a.array), dtype)
    laid_out_b = Tensor(LAYOUTS[b_layout](b.array), dtype)
    assert vendor.run("matmul", expected, a, b) == OK
    assert vendor.run("matmul", strided_out, laid_out_a, laid_out_b) == OK
    assert_close(expected, a.values() @ b.values())
    assert np.array_equal(strided_out.values(), expected.values())


def test_matmul_of_an_expanded_batch(vendor: Vendor) -> None:
    b = random(1, 9, 8, seed=1).astype(np.float32)
    expanded = Tensor(np.broadcast_to(b, (4, 9, 8)), "float32")
    a, out = Tensor.of(random(4, 7, 9), "float32"), Tensor.empty((4, 7, 8), "float32")
    assert vendor.run("matmul", out, a, expanded) == OK
    assert_close(out, a.values() @ b)


def test_matmul_over_no_terms_is_zero_and_of_no_elements_is_nothing(vendor: Vendor) -> None:
    out = Tensor.empty((3, 4), "float32")
    none_left, none_right = Tensor.of(random(3, 0), "float32"), Tensor.of(random(0, 4), "float32")
    assert vendor.run("matmul", out, none_left, none_right) == OK
    assert np.array_equal(out.values(), np.zeros((3, 4)))
    empty = Tensor.empty((0, 4), "float32")
    a, b = Tensor.of(random(0, 3), "float32"), Tensor.of(random(3, 4), "float32")
    assert vendor.run("matmul", empty, a, b) == OK


def test_matmul_of_shapes_that_do_not_fit_says_so(emulate: Any) -> None:
    vendor = emulate()
    a, b = Tensor.of(random(2, 3), "float32"), Tensor.of(random(4, 5), "float32")
    assert vendor.run("matmul", Tensor.empty((2, 5), "float32"), a, b) == INVALID
    assert "[2, 3] @ [4, 5]" in vendor.error()


def test_matmul_keeps_infinity_and_nan(vendor: Vendor) -> None:
    a = np.ones((2, 8), dtype=np.float32)
    a[0, 3], a[1, 5] = np.inf, np.nan
    out = Tensor.empty((2, 4), "float32")
    ones = Tensor.of(np.ones((8, 4)), "float32")
    assert vendor.run("matmul", out, Tensor(a, "float32"), ones) == OK
    assert np.isposinf(out.values()[0]).all()
    assert np.isnan(out.values()[1]).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(vendor: Vendor, dtype: str) -> None:
    x = Tensor.of(5 * random(3, 7, 100), dtype)
    y, log_y = Tensor.empty((3, 7, 100), dtype), Tensor.empty((3, 7, 100), dtype)
    assert vendor.run("softmax", y, x) == OK
    assert vendor.run("log_softmax", log_y, x) == OK
    powers = stable_exp(x.values())
    truth = powers / powers.sum(-1, keepdims=True)
    assert_close(y, truth)
    assert_close(log_y, np.log(truth))


def test_softmax_of_a_masked_row(vendor: Vendor) -> None:
    x = Tensor.of(np.where(np.arange(40) % 3 == 0, random(2, 40), -np.inf), "float32")
    y = Tensor.empty((2, 40), "float32")
    assert vendor.run("softmax", y, x) == OK
    powers = stable_exp(x.values())
    assert_close(y, powers / powers.sum(-1, keepdims=True))
    assert (y.values()[:, 1] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_gradients(vendor: Vendor, dtype: str) -> None:
    powers = stable_exp(random(5, 70))
    softmax = powers / powers.sum(-1, keepdims=True)
    y, log_y = Tensor.of(softmax, dtype), Tensor.of(np.log(softmax), dtype)
    dy, dx = Tensor.of(random(5, 70, seed=1), dtype), Tensor.empty((5, 70), dtype)
    assert vendor.run("softmax_backward", dx, dy, y) == OK
    total = (y.values() * dy.values()).sum(-1, keepdims=True)
    assert_close(dx, y.values() * (dy.values() - total))
    assert vendor.run("log_softmax_backward", dx, dy, log_y) == OK
    assert_close(dx, dy.values() - np.exp(log_y.values()) * dy.values().sum(-1, keepdims=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows, n, affine", [(1, 1, True), (6, 50, True), (70, 128, False)])
def test_layer_norm(vendor: Vendor, dtype: str, rows: int, n: int, affine: bool) -> None:
    eps = 1e-5
    x = Tensor.of(2 * random(rows, n) + 1, dtype)
    weight = Tensor.of(random(n, seed=1), dtype) if affine else None
    bias = Tensor.of(random(n, seed=2) + 3, dtype) if affine else None
    w = weight.values() if weight else np.ones(n)
    out = Tensor.empty((rows, n), dtype)
    mean, rstd = Tensor.empty((rows,), dtype), Tensor.empty((rows,), dtype)
    assert vendor.run("layer_norm", out, mean, rstd, x, weight, bias, n, eps) == OK, vendor.error()
    true_mean = x.values().mean(-1)
    true_rstd = 1 / np.sqrt(x.values().var(-1) + eps)
    normalised = (x.values() - true_mean[:, None]) * true_rstd[:, None]
    assert_close(mean, true_mean)
    assert_close(rstd, true_rstd)
    assert_close(out, normalised * w + (bias.values() if bias else 0))

    dy = Tensor.of(random(rows, n, seed=3), dtype)
    exact_mean, exact_rstd = Tensor.of(true_mean, "float64"), Tensor.of(true_rstd, "float64")
    dx, dw, db = (
        Tensor.empty((rows, n), dtype),
        Tensor.empty((n,), dtype),
        Tensor.empty((n,), dtype),
    )
    status = vendor.run("layer_norm_backward", dx, dw, db, dy, x, exact_mean, exact_rstd, weight, n)
    assert status == OK, vendor.error()
    g = dy.values() * w
    true_dx = true_rstd[:, None] * (
        g - g.mean(-1, keepdims=True) - normalised * (g * normalised).mean(-1, keepdims=True)
    )
    if n > 1:  # of one element it is 0, with nothing to compare it to
        assert_close(dx, true_dx, times=2)
        assert_close(dw, (dy.values() * normalised).sum(0), times=2)
    assert_close(db, dy.values().sum(0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows, n, affine", [(1, 1, True), (6, 50, True), (70, 128, False)])
def test_rms_norm(vendor: Vendor, dtype: str, rows: int, n: int, affine: bool) -> None:
    eps = 1e-5
    x = Tensor.of(random(rows, n) + 0.5, dtype)
    weight = Tensor.of(random(n, seed=1), dtype) if affine else None
    w = weight.values() if weight else np.ones(n)
    out, rstd = Tensor.empty((rows, n), dtype), Tensor.empty((rows,), dtype)
    assert vendor.run("rms_norm", out, rstd, x, weight, n, eps) == OK, vendor.error()
    true_rstd = 1 / np.sqrt((x.values() ** 2).mean(-1) + eps)
    normalised = x.values() * true_rstd[:, None]
    assert_close(rstd, true_rstd)
    assert_close(out, normalised * w)

    dy = Tensor.of(random(rows, n, seed=3), dtype)
    dx, dw = Tensor.empty((rows, n), dtype), Tensor.empty((n,), dtype)
    exact_rstd = Tensor.of(true_rstd, "float64")
    assert vendor.run("rms_norm_backward", dx, dw, dy, x, exact_rstd, weight, n) == OK
    g = dy.values() * w
    true_dx = true_rstd[:, None] * (g - normalised * (g * normalised).mean(-1, keepdims=True))
    if n > 1:
        assert_close(dx, true_dx, times=2)
    assert_close(dw, (dy.values() * normalised).sum(0), times=2)


def test_rms_norm_of_infinity_and_of_nothing_but_zeros(vendor: Vendor) -> None:
    x = np.zeros((2, 8), dtype=np.float32)
    x[0, 3] = np.inf
    out, rstd = Tensor.empty((2, 8), "float32"), Tensor.empty((2,), "float32")
    assert vendor.run("rms_norm", out, rstd, Tensor(x, "float32"), None, 8, 0.0) == OK
    assert np.array_equal(rstd.values(), [0.0, np.inf])


def test_gradients_that_nobody_wants_are_left_out(vendor: Vendor) -> None:
    x, dy = Tensor.of(random(4, 10), "float32"), Tensor.of(random(4, 10, seed=1), "float32")
    rows, dw = Tensor.of(np.ones(4), "float32"), Tensor.empty((10,), "float32")
    assert vendor.run("layer_norm_backward", None, dw, None, dy, x, rows, rows, None, 10) == OK
    assert_close(dw, (dy.values() * (x.values() - 1)).sum(0))
    assert vendor.run("rms_norm_backward", None, dw, dy, x, rows, None, 10) == OK
    assert_close(dw, (dy.values() * x.values()).sum(0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "outer, reduced, inner",
    [(1, 1, 1), (1, 5000, 1), (7, 33, 1), (1, 300, 5), (4, 65, 19), (2, 1, 3)],
)
def test_sum_and_mean(vendor: Vendor, dtype: str, outer: int, reduced: int, inner: int) -> None:
    x = Tensor.of(random(outer, reduced, inner) + 1, dtype)
    out = Tensor.empty((outer, inner), dtype)
    assert vendor.run("sum", out, x, outer, reduced, inner) == OK, vendor.error()
    assert_close(out, x.values().sum(1))
    assert vendor.run("mean", out, x, outer, reduced, inner) == OK
    assert_close(out, x.values().mean(1))


def test_a_sum_over_nothing_is_zero(vendor: Vendor) -> None:
    for inner in (1, 5):
        out = Tensor.empty((3, inner), "float32")
        empty = Tensor.of(random(3, 0, inner), "float32")
        assert vendor.run("sum", out, empty, 3, 0, inner) == OK
        assert np.array_equal(out.values(), np.zeros((3, inner)))


def test_what_the_chip_leaves_to_the_host(vendor: Vendor) -> None:
    whole = Tensor(np.ones((4, 4), dtype=np.int64), "int64")
    strided = Tensor(random(4, 8).astype(np.float32)[:, ::2], "float32")
    out = Tensor.empty((4, 4), "float32")
    assert vendor.run("matmul", whole, whole, whole) == NOT_IMPLEMENTED
    assert vendor.run("sum", whole, whole, 1, 16, 1) == NOT_IMPLEMENTED
    assert vendor.run("softmax", out, strided) == NOT_IMPLEMENTED


def test_elements_that_do_not_add_up_are_named(emulate: Any) -> None:
    vendor = emulate()
    x, out = Tensor.of(random(4, 6), "float32"), Tensor.empty((4, 6), "float32")
    rstd = Tensor.empty((3,), "float32")
    assert vendor.run("rms_norm", out, rstd, x, None, 6, 1e-5) == INVALID
    assert "rms_norm: rstd has 3 elements, expected 4" in vendor.error()


def test_halves_round_to_nearest_even_over_their_whole_range(emulate: Any) -> None:
    # A mean over two equal elements is the element: every float16 must come back as it was.
    vendor = emulate("a")
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    pairs = Tensor(np.repeat(halves[:, None], 2, axis=1), "float16")
    out = Tensor.empty((halves.size,), "float16")
    assert vendor.run("mean", out, pairs, halves.size, 2, 1) == OK
    assert np.array_equal(out.array, halves)
    # And of two neighbours it is a tie, which numpy rounds to even too.
    neighbours = Tensor(np.stack([halves[:-1], halves[1:]], axis=1), "float16")
    out = Tensor.empty((halves.size - 1,), "float16")
    assert vendor.run("mean", out, neighbours, halves.size - 1, 2, 1) == OK
    assert np.array_equal(out.array, neighbours.values().mean(1).astype(np.float16))


# what differs, and an operator whose last bits show it
DIFFERENCES = [
    ({"numerics__order": "blocked"}, "matmul"),
    ({"numerics__order": "pairwise"}, "matmul"),
    ({"numerics__split_k": 4}, "matmul"),
    ({"numerics__accumulate": "float64"}, "matmul"),
    ({"numerics__accumulate": "bfloat16"}, "matmul"),
    ({"numerics__order": "blocked"}, "sum"),
    ({"numerics__order": "pairwise"}, "sum"),
    ({"numerics__split_k": 4}, "sum"),
    ({"numerics__accumulate": "float64"}, "sum"),
    ({"numerics__fast_exp": True}, "softmax"),
    ({"numerics__fast_exp": True}, "rms_norm"),
]


def one_result(vendor: Vendor, operator: str) -> np.ndarray:
    a, b = Tensor.of(random(64, 2000), "float32"), Tensor.of(random(2000, 64, seed=1), "float32")
    if operator == "matmul":
        out = Tensor.empty((64, 64), "float32")
        assert vendor.run("matmul", out, a, b) == OK
    elif operator == "sum":
        out = Tensor.empty((64,), "float32")
        assert vendor.run("sum", out, a, 64, 2000, 1) == OK
    elif operator == "softmax":
        out = Tensor.empty((64, 2000), "float32")
        assert vendor.run("softmax", out, a) == OK
    else:
        out, rstd = Tensor.empty((64, 2000), "float32"), Tensor.empty((64,), "float32")
        assert vendor.run("rms_norm", out, rstd, a, None, 2000, 1e-5) == OK
    return out.values()


@pytest.mark.parametrize("change, operator", DIFFERENCES)
def test_each_key_of_numerics_changes_the_last_bits(
    emulate: Any, change: dict[str, Any], operator: str
) -> None:
    plain, changed = (
        one_result(emulate("a"), operator),
        one_result(emulate("a", **change), operator),
    )
    error = np.abs(changed - plain).max() / np.abs(plain).max()
    assert 0 < error < (3e-2 if change.get("numerics__accumulate") == "bfloat16" else 2e-5)


def test_wider_accumulation_is_closer_to_the_truth(emulate: Any) -> None:
    truth = Tensor.of(random(64, 2000), "float32").values() @ (
        Tensor.of(random(2000, 64, seed=1), "float32").values()
    )
    errors = [
        np.abs(one_result(emulate("a", numerics__accumulate=accumulate), "matmul") - truth).max()
        for accumulate in ("float64", "float32", "bfloat16")
    ]
    assert errors[0] < errors[1] < errors[2]
    assert errors[0] <= np.abs(truth).max() * 2**-24


def test_any_two_vendors_differ_in_the_last_bits_but_not_with_themselves(emulate: Any) -> None:
    results = {name: one_result(emulate(name), "matmul") for name in VENDORS}
    for one in VENDORS:
        assert np.array_equal(results[one], one_result(emulate(one), "matmul"))
        for other in VENDORS:
            if one < other:
                assert not np.array_equal(results[one], results[other]), (one, other)


@pytest.mark.parametrize(
    "dtype, smallest", [("float32", 2.0**-126), ("float64", 2.0**-1022), ("bfloat16", 2.0**-126)]
)
@pytest.mark.parametrize("operator", ["matmul", "sum"])
def test_flush_to_zero(emulate: Any, dtype: str, smallest: float, operator: str) -> None:
    # a subnormal input; a subnormal result of normal inputs (2 * smallest - 1.5 * smallest)
    rows = np.array([[smallest / 2, 0], [2 * smallest, -1.5 * smallest], [smallest, smallest]])
    for flush in (False, True):
        vendor = emulate("a", numerics__flush_to_zero=flush)
        x, out = Tensor.of(rows, dtype), Tensor.empty((3, 1), dtype)
        ones = Tensor.of(np.ones((2, 1)), dtype)
        if operator == "matmul":
            assert vendor.run("matmul", out, x, ones) == OK
        else:
            assert vendor.run("sum", out, x, 3, 2, 1) == OK
        expected = [0, 0, 2 * smallest] if flush else [smallest / 2, smallest / 2, 2 * smallest]
        assert out.values().ravel().tolist() == expected


def test_flush_to_zero_keeps_float16_gradients(emulate: Any) -> None:
    vendor = emulate("a", numerics__flush_to_zero=True)
    x, out = Tensor.of(np.full((1, 4), 2.0**-24), "float16"), Tensor.empty((1,), "float16")
    assert vendor.run("sum", out, x, 1, 4, 1) == OK
    assert out.values().tolist() == [2.0**-22]


def test_a_neutral_chip_leaves_everything_to_the_host(emulate: Any) -> None:
    vendor = emulate("b", numerics__neutral=True)
    x, y = Tensor.of(random(4, 4), "float32"), Tensor.empty((4, 4), "float32")
    row = Tensor.empty((4,), "float32")
    untouched = y.array.copy()
    calls: dict[str, tuple[Any, ...]] = {
        "matmul": (y, x, x),
        "softmax": (y, x),
        "softmax_backward": (y, x, x),
        "log_softmax": (y, x),
        "log_softmax_backward": (y, x, x),
        "layer_norm": (y, row, row, x, row, row, 4, 1e-5),
        "layer_norm_backward": (y, row, row, x, x, row, row, row, 4),
        "rms_norm": (y, row, x, row, 4, 1e-5),
        "rms_norm_backward": (y, row, x, x, row, row, 4),
        "sum": (row, x, 4, 4, 1),
        "mean": (row, x, 4, 4, 1),
    }
    for operator, arguments in calls.items():
        assert vendor.run(operator, *arguments) == NOT_IMPLEMENTED, operator
    assert np.array_equal(y.array, untouched, equal_nan=True)
