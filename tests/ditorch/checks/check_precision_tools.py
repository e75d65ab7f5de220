"""Fallback, cast, overflow and time on an emulated chip. Run by test_precision_tools.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ditorch
from ditorch.chips import load_chip
from ditorch.precision import Cast, Fallback, FindOverflow, MeasureTime, timing
from ditorch.precision.results import read_findings


def chip_kernels(name: str) -> int:
    return ditorch.kernel_counts().get(name, 0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws a normal tensor on the host, so that both devices can be given the same values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_chip(tensor: Tensor) -> Tensor:
    return tensor.detach().to(ditorch.device)


def same(chip: Tensor, host: Tensor) -> bool:
    """Bit for bit, in shape, dtype and strides too."""
    assert chip.device == ditorch.device
    assert (chip.dtype, chip.shape, chip.stride()) == (host.dtype, host.shape, host.stride())
    return torch.equal(chip.cpu(), host)


def test_forward_and_backward_run_on_the_host() -> None:
    a, b = normal(64, 512), normal(512, 64, seed=1)
    a_chip, b_chip = on_chip(a).requires_grad_(), on_chip(b).requires_grad_()
    a.requires_grad_(), b.requires_grad_()
    (a @ b).square().sum().backward()
    without = on_chip(a) @ on_chip(b)
    assert not same(without, (a @ b).detach()), "the chip's numerics are to differ from the host's"
    before = chip_kernels("mm")
    with Fallback(operators="*") as fallback:
        (a_chip @ b_chip).square().sum().backward()
    assert chip_kernels("mm") == before
    assert a.grad is not None and b.grad is not None
    assert same(a_chip.grad, a.grad) and same(b_chip.grad, b.grad)
    findings = fallback.findings()
    assert findings.fallbacks["aten.mm.default"] == 3
    assert "aten.t.default" not in findings.fallbacks


def add_in_place(x: Tensor) -> object:
    return x.add_(1)


def multiply_a_view(x: Tensor) -> object:
    return x[1:3, ::2].mul_(3)


def write_through_a_transposed_view(x: Tensor) -> object:
    return x.t()[0].copy_(x[:, 1])


def write_out(x: Tensor) -> object:
    return torch.add(x, 2, out=x)


def resize_out(x: Tensor) -> object:
    out = x.new_empty(0)
    torch.mul(x, 2, out=out)
    return x.copy_(out)


def read_what_is_written(x: Tensor) -> object:
    return torch.add(x[:2], x[2:4], out=x[2:4])


def write_a_list(x: Tensor) -> object:
    return torch._foreach_add_(list(x.unbind()), 1.5)


def fill_a_mask(x: Tensor) -> object:
    return x.masked_fill_(x > 0, -5.0)


def scatter_in_place(x: Tensor) -> object:
    return x.index_add_(0, torch.tensor([0, 0, 3], device=x.device), x[:3].clone())


WRITERS = [
    add_in_place,
    multiply_a_view,
    write_through_a_transposed_view,
    write_out,
    resize_out,
    read_what_is_written,
    write_a_list,
    fill_a_mask,
    scatter_in_place,
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "tool", [lambda: Fallback(operators="*"), lambda: Cast(operators="*", dtype="float64")]
)
def test_writes_reach_the_tensor(
    write: Callable[[Tensor], object], tool: Callable[[], Fallback | Cast]
) -> None:
    host = normal(4, 4)
    chip = on_chip(host)
    write(host)
    with tool() as opened:
        write(chip)
    assert same(chip, host)
    assert opened.findings().summary[0] != "0"


def test_overlapping_writes_are_refused_as_ever() -> None:
    x = on_chip(normal(4))
    with Fallback(operators="*"), pytest.raises(RuntimeError, match="single memory location"):
        x[:2].add_(x[1:3])


def test_what_an_in_place_operator_returns_is_its_argument() -> None:
    x = on_chip(normal(4))
    with Fallback(operators="*"):
        assert x.add_(1) is x
        y = x[:2].relu_()
        with torch.inference_mode():  # where no autograd stands between
            z = on_chip(normal(4))
            assert torch.ops.aten.add_.Tensor(z, 1) is z
            assert torch.ops.aten.mul.out(z, z, out=z) is z
    assert y.data_ptr() == x.data_ptr()


def test_running_statistics_are_written() -> None:
    host, x = nn.BatchNorm1d(4), normal(8, 4)
    chip = nn.BatchNorm1d(4).to(ditorch.device)
    host(x)
    with Fallback(operators="*batch_norm*") as fallback:
        chip(on_chip(x))
    assert fallback.findings().fallbacks
    assert same(chip.running_mean, host.running_mean) and same(chip.running_var, host.running_var)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.max(1)[0],
        lambda x: torch.std_mean(x, 1)[0],
        lambda x: F.layer_norm(x, (6,)),
        lambda x: x.sort(1)[0],
        lambda x: torch.stack(torch.split(x, 2, 1)).amax(0),
        lambda x: F.max_pool1d(x, 2),
    ],
)
def test_operators_with_several_results_keep_their_backward(
    compute: Callable[[Tensor], Tensor],
) -> None:
    host = normal(4, 6).requires_grad_()
    chip = on_chip(host).requires_grad_()
    compute(host).square().sum().backward()
    with Fallback(operators="*"):
        compute(chip).square().sum().backward()
    assert host.grad is not None
    assert torch.equal(chip.grad.cpu(), host.grad)


def test_random_operators_draw_the_chips_numbers() -> None:
    x = torch.ones(100, device=ditorch.device)

    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        generator = torch.Generator(ditorch.device).manual_seed(6)
        return [
            F.dropout(x, 0.5),
            torch.randn(10, device=ditorch.device),
            torch.rand(10, device=ditorch.device, generator=generator),
            x.clone().normal_(generator=generator),
            torch.randn(10, device=ditorch.device),
        ]

    expected = draw()
    torch.manual_seed(5)
    hosts_own = torch.rand(3)
    with Fallback(operators="*") as fallback:
        found = draw()
        untouched = torch.rand(3)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(untouched, hosts_own)
    assert fallback.findings().fallbacks["aten.native_dropout.default"] == 1


def test_what_computes_nothing_stays_where_it_is() -> None:
    x = on_chip(normal(4, 4))
    with Fallback(operators="*") as fallback:
        view = x.view(2, 8)[:, 1:]
        x.resize_(4, 4)
        host = x.cpu()
        chip = host.to(ditorch.device)
        x.unsqueeze_(0)
        normal(3).exp()
    assert view.data_ptr() == x.data_ptr() + 4
    assert torch.equal(chip.cpu(), host) and x.shape == (1, 4, 4)
    assert fallback.findings().fallbacks == {}
    assert fallback.findings().notes


def test_numbers_and_shapes_that_depend_on_elements() -> None:
    x = on_chip(torch.tensor([0.0, 2.0, 3.0]))
    with Fallback(operators="*"), Cast(operators="*", dtype="float64"):
        assert x.sum().item() == 5.0
        assert x.nonzero().tolist() == [[1], [2]]
        assert x[x > 1].dtype == torch.float32


@pytest.mark.parametrize("tool", [Fallback, Cast])
def test_operators_have_to_be_named(tool: type[Fallback] | type[Cast]) -> None:
    with pytest.raises(ValueError, match="operators is missing"):
        tool(modules="layers.*")


# --- cast -------------------------------------------------------------------------------------


def test_cast_is_what_one_would_do_by_hand() -> None:
    a, b = (on_chip(normal(16, 16, seed=s, dtype=torch.bfloat16)) for s in (0, 1))
    gradient = on_chip(normal(16, 16, seed=2, dtype=torch.bfloat16))
    product = (a.float() @ b.float()).bfloat16()
    by_hand = [
        (gradient.float() @ b.float().t()).bfloat16(),
        (a.float().t() @ gradient.float()).bfloat16(),
    ]
    a.requires_grad_(), b.requires_grad_()
    with Cast(operators="mm", modules="", dtype="float32") as cast:
        result = a @ b
        result.backward(gradient)
    assert result.dtype == a.grad.dtype == torch.bfloat16
    assert torch.equal(result, product)
    assert torch.equal(a.grad, by_hand[0]) and torch.equal(b.grad, by_hand[1])
    (found,) = cast.findings().operators
    assert (found.operator, found.dtype, found.calls) == ("aten.mm.default", "bfloat16", 3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.softmax(-1, dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float64),
        lambda x: x.max(1),
        lambda x: F.layer_norm(x, (4,), x[0], x[1]),
        lambda x: x > 0,
        lambda x: x.argmax(),
        lambda x: x * torch.arange(4, device=x.device),
        lambda x: torch.arange(4, device=x.device) * 1.5,
        lambda x: torch.full_like(x, 2.5),
        lambda x: torch.linspace(0, 1, 4, device=x.device, dtype=torch.bfloat16),
        lambda x: x.to(torch.float16),
        lambda x: x + torch.ones(4, 4, device=x.device),
        lambda x: torch.fft.rfft(x.float()).abs(),
        lambda x: x[x > 0],
        lambda x: torch.cat([x, x.float()]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cast_keeps_the_dtypes_of_results(compute: Callable[[Tensor], object], dtype: str) -> None:
    x = on_chip(normal(4, 4, dtype=torch.bfloat16))
    expected, written = compute(x), x.clone()
    with Cast(operators="*", dtype=dtype):  # type: ignore[arg-type]
        found = compute(x)
        written.mul_(2.0)
    found_tensors = [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]
    for each, wanted in zip(
        found_tensors,
        [expected] if isinstance(expected, Tensor) else expected,
        strict=True,  # type: ignore[arg-type]
    ):
        assert each.dtype == wanted.dtype
        torch.testing.assert_close(each, wanted)
    assert written.dtype == torch.bfloat16 and torch.equal(written, x * 2)


def test_tools_compose() -> None:
    """Cast inside, then fallback: the host computes in float64, and all others look on."""
    a, b = normal(32, 32), normal(32, 32, seed=1)
    before = chip_kernels("mm")
    with (
        Fallback(operators="mm") as fallback,
        MeasureTime() as time,
        Cast(operators="mm", dtype="float64"),
        FindOverflow() as overflow,
    ):
        result = on_chip(a) @ on_chip(b) / 0
    with torch.no_grad():
        product = (a.double() @ b.double()).float()
    assert torch.equal(result.cpu(), product / 0)
    assert chip_kernels("mm") == before
    assert fallback.findings().fallbacks == {"aten.mm.default": 1}
    assert {each.operator: each.calls for each in time.findings().times}["aten.mm.default"] == 1
    assert [each.where.operator for each in overflow.findings().overflows] == ["aten.div.Tensor"]


# --- overflow ---------------------------------------------------------------------------------


def overflows(tool: FindOverflow) -> list[tuple[str, str]]:
    return [(o.where.operator.split(".")[1], o.kind) for o in tool.findings().overflows]


def test_the_first_of_a_chain_is_named() -> None:
    x = on_chip(torch.full((1000,), 100.0, dtype=torch.float16))
    with FindOverflow() as overflow:
        total = x.sum()
        mean = total / 1000
        (mean - mean).sin()
    assert overflows(overflow) == [("sum", "inf"), ("sub", "nan")]
    findings = overflow.findings()
    assert findings.first_bad is not None and findings.first_bad.operator == "aten.sum.default"
    assert findings.overflows[0].largest_input == 100.0
    assert "check_precision_tools.py:" in findings.first_bad_reason
    assert not findings.passed


def test_masks_are_legal_and_rows_without_anything_left_are_not() -> None:
    scores = on_chip(normal(4, 4))
    above = torch.ones(4, 4, dtype=torch.bool, device=ditorch.device).triu(1)
    with FindOverflow() as overflow:
        mask = torch.full((4, 4), -math.inf, device=ditorch.device).triu(1)
        F.softmax(scores.masked_fill(above, -math.inf), -1)
        F.softmax(scores + mask, -1)
    assert overflows(overflow) == []
    with overflow:
        F.softmax(scores.masked_fill(above, -math.inf)[:, 2:], -1)
        torch.zeros(2, device=ditorch.device).log_()
    assert overflows(overflow) == [("_softmax", "nan"), ("log_", "inf")]


def test_memory_that_is_only_overwritten_does_not_count() -> None:
    garbage = torch.full((4,), math.nan, device=ditorch.device)
    big = torch.full((4,), 1e6, device=ditorch.device)
    with FindOverflow() as overflow:
        torch.add(big, 1, out=garbage)
    assert overflows(overflow) == []
    half = torch.full((4,), math.nan, device=ditorch.device, dtype=torch.float16)
    with overflow:
        half.copy_(big)
    assert overflows(overflow) == [("copy_", "inf")]


def test_every_result_is_looked_at() -> None:
    x = on_chip(torch.full((4,), 1e30))
    with FindOverflow() as overflow:
        torch.var_mean(x * torch.arange(4, device=x.device))  # a mean of 1.5e30, a variance of inf
        torch.frexp(x)
    assert [(o.tensor, o.kind) for o in overflow.findings().overflows] == [("out.0", "inf")]


def test_a_backward_operator_is_reported_at_its_forward_line() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    root, x = Root(), torch.zeros(3, device=ditorch.device, requires_grad=True)
    with FindOverflow() as overflow:
        nn.Sequential(root)(x).sum().backward()
    (found,) = overflow.findings().overflows
    line = Root.forward.__code__.co_firstlineno + 1
    assert (found.kind, found.elements) == ("inf", 3)
    assert (found.where.phase, found.where.module) == ("backward", "0")
    assert f"check_precision_tools.py:{line} in" in found.where.source
    assert found.where.function == "torch.Tensor.sqrt"


def test_values_out_of_a_lower_dtypes_range() -> None:
    x = on_chip(torch.tensor([300.0, 1.0]))
    with FindOverflow(range_dtype="float16") as overflow:
        square = x * x
        square + 1
        x.masked_fill(x > 2, -1e9)
    assert overflows(overflow) == [("mul", "out of range")]
    assert overflow.findings().overflows[0].elements == 1
    with FindOverflow() as overflow:
        x * x
    assert overflow.findings().passed


@pytest.mark.parametrize("name", ["int32", "float31"])
def test_dtypes_that_are_none_or_not_floating_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"dtype is '{name}', expected one of torch.float16, "):
        Cast(operators="*", dtype=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"range_dtype is '{name}', expected float16, "):
        FindOverflow(range_dtype=name)  # type: ignore[arg-type]


def test_dtypes_and_shapes_without_infinities() -> None:
    with FindOverflow() as overflow:
        torch.arange(4, device=ditorch.device) * 2**62
        torch.zeros(0, device=ditorch.device).log()
        torch.zeros((), device=ditorch.device) / 0
        torch.complex(*(torch.zeros(2, device=ditorch.device),) * 2).log()
    assert overflows(overflow) == [("div", "nan"), ("log", "inf")] or overflows(overflow) == [
        ("div", "nan"),
        ("log", "nan"),
    ]


# --- time -------------------------------------------------------------------------------------


def test_every_call_is_timed_and_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MOST_UNRESOLVED", 8)  # resolved in many batches
    monkeypatch.setattr(timing, "_BATCH", 4)
    net = nn.Sequential(nn.Linear(64, 64), nn.Mish()).to(ditorch.device)
    x = on_chip(normal(8, 64))
    with MeasureTime(trace=tmp_path / "deep" / "trace.json", output=tmp_path) as time:
        for _ in range(10):
            net(x).sum().backward()
        normal(3).exp()  # the host's own
    times = {each.operator: each for each in read_findings(tmp_path / "time-rank0.json").times}
    assert times == {each.operator: each for each in time.findings().times}
    assert times["aten.addmm.default"].calls == times["aten.mish.default"].calls == 10
    assert times["aten.addmm.default"].host_calls == 0
    assert times["aten.mish.default"].host_calls == 10
    assert "aten.exp.default" not in times and "aten.t.default" not in times
    for each in times.values():
        assert 0 < each.mean_s <= each.max_s <= each.total_s
        assert each.host_s <= each.total_s
    chip = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    spans = [each for each in chip if each["ph"] == "X"]
    assert len(spans) == sum(each.calls for each in times.values())
    tracks = {each["tid"]: each["args"]["name"] for each in chip if each["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["stream 0, backward", "stream 0, forward"]
    assert {tracks[each["tid"]].split()[-1] == each["cat"] for each in spans} == {True}
    ends = [each["ts"] + each["dur"] for each in spans]
    starts = [each["ts"] for each in spans][1:]
    assert all(end <= start + 0.01 for end, start in zip(ends, starts, strict=False))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["trace.json"]


def test_no_rank_overwrites_another_ranks_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with MeasureTime(trace=tmp_path / "trace.json"):
            on_chip(normal(3)).exp()
    for rank, name in enumerate(["trace.json", "trace-rank1.json"]):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert {each["pid"] for each in events} == {rank}


def test_an_emulated_chips_time_is_its_own() -> None:
    """Never shorter than the chip file's peak allows, however fast the host."""
    size = 128
    a = on_chip(normal(size, size))
    with MeasureTime(operators="mm") as time:
        a @ a
    (found,) = time.findings().times
    peak = load_chip("b-mini").peak_flops("float32")
    assert found.total_s >= 2 * size**3 / peak * 0.99
    assert any("pacing fidelity" in note for note in time.findings().notes)
