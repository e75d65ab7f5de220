"""Parts of SyncBatchNorm: two ranks' halves of a batch give what the whole batch gives."""

import pytest
import torch
import torch.nn.functional as F

EPS, MOMENTUM = 1e-5, 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 4, 2)])
@pytest.mark.parametrize("with_counts", [False, True])
def test_halves_of_a_batch_are_normalized_together(dtype, shape, with_counts) -> None:
    torch.manual_seed(0)
    rounded = torch.randn(shape).add_(3).to(dtype)
    whole = rounded.double().requires_grad_()
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    truth = F.batch_norm(whole, *running, weight, bias, True, MOMENTUM, EPS)
    grad = torch.randn(shape).to(dtype)
    truth.backward(grad.double())

    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [2, 4] if with_counts else [3, 3]
    counts = [part * whole[0, 0].numel() for part in parts]
    xs, grads = rounded.to("device").split(parts), grad.to("device").split(parts)
    on_chip = [x.detach().to("device", statistics) for x in (weight, bias)]
    means, invstds = zip(*(torch.batch_norm_stats(x, EPS) for x in xs), strict=True)
    gathered = (xs[0], torch.stack(means), torch.stack(invstds))
    kept = [x.to("device", statistics) for x in (torch.zeros(3), torch.ones(3))]
    if with_counts:
        number = torch.tensor(counts, dtype=statistics, device="device")
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            *gathered, *kept, MOMENTUM, EPS, number
        )
    else:
        mean, invstd = torch.batch_norm_gather_stats(*gathered, *kept, MOMENTUM, EPS, counts[0])
    ys = [torch.batch_norm_elemt(x, *on_chip, mean, invstd, EPS) for x in xs]
    sums = [
        torch.batch_norm_backward_reduce(g, x, mean, invstd, on_chip[0], True, True, True)
        for g, x in zip(grads, xs, strict=True)
    ]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (sum(part) for part in zip(*sums, strict=True))
    number = torch.tensor(counts, dtype=torch.int32, device="device")
    grads_in = [
        torch.batch_norm_backward_elemt(g, x, mean, invstd, on_chip[0], sum_dy, sum_dy_xmu, number)
        for g, x in zip(grads, xs, strict=True)
    ]

    assert {y.dtype for y in (*ys, *grads_in)} == {dtype}
    assert mean.dtype == invstd.dtype == statistics
    results = [torch.cat(ys), torch.cat(grads_in), grad_weight, grad_bias, *kept]
    expected = [truth, whole.grad, weight.grad, bias.grad, *running]
    for result, right in zip(results, expected, strict=True):
        limit = 32 * torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.cpu().double(), right.detach(), rtol=limit, atol=limit)


def test_what_is_not_asked_for_is_not_returned() -> None:
    x = torch.randn(4, 3, device="device")
    mean, invstd = torch.batch_norm_stats(x, EPS)
    found = torch.batch_norm_backward_reduce(x, x, mean, invstd, None, True, False, False)
    assert [part is None for part in found] == [False, False, True, True]
    out = torch.empty(0, device="device")
    torch.batch_norm_elemt(x, None, None, mean, invstd, EPS, out=out)
    torch.testing.assert_close(
        out.cpu(), F.batch_norm(x.cpu(), None, None, training=True), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("bins", "least", "most"), [(8, 0, 7), (5, 0, 0), (16, 3, 100), (1, 0, 1)])
def test_whole_numbers_are_counted(dtype, bins, least, most) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(0, 110, (200,), dtype=dtype)
    found = torch.histc(numbers.to("device"), bins, least, most)
    values = numbers.tolist()
    low, high = (min(values), max(values)) if least == most else (least, most)
    right = [0] * bins
    for value in values:
        if low <= value <= high:
            right[min((value - low) * bins // (high - low), bins - 1)] += 1
    wrapped = torch.tensor(right).to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), wrapped)
    out = torch.empty(0, dtype=dtype, device="device")
    assert torch.histc(numbers.to("device"), bins, least, most, out=out) is out
    assert torch.equal(out.cpu(), wrapped)
