"""Compare on an emulated chip, and faults planted in its kernels. Run by test_compare.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, relu

import ditorch
from ditorch.precision.compare import Compare, PrecisionError
from ditorch.precision.overflow import FindOverflow
from ditorch.precision.results import Findings, OperatorFinding, read_findings

CHIP = ditorch.device


@contextmanager
def planted(name: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """The chip's kernel replaced; the host's is left as it is."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        library.impl(name, kernel, "PrivateUse1")
    try:
        yield
    finally:
        library._destroy()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(CHIP, dtype)


def compared(run: Callable[[], Any], **options: Any) -> Findings:
    with Compare(**options) as compare:
        run()
    return compare.findings()


def finding(findings: Findings, operator: str, tensor: str = "out") -> OperatorFinding:
    (found,) = (
        each
        for each in findings.operators
        if each.operator == f"aten.{operator}" and each.tensor == tensor
    )
    return found


def failed(findings: Findings) -> list[str]:
    return [each.operator for each in findings.operators if not each.passed]


# --- what is right passes, and stays as it is -------------------------------------------------


def everything() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, y = normal(6, 8, dtype=dtype), normal(6, 8, seed=1, dtype=dtype)
        x + y, x * 0.1, x / 3, x.sub(y, alpha=0.7), 0.3 + x, x.lerp(y, 0.3), x.addcmul(x, y)
        x.exp(), x.tanh(), F.gelu(x), F.silu(x), x.abs().rsqrt(), x.sigmoid(), x.pow(3), x.sin()
        x.softmax(-1), x.log_softmax(0), x.logsumexp(1), F.layer_norm(x, (8,)), F.rms_norm(x, (8,))
        x.sum(), x.mean(0), x.var(1), x.norm(), x.cumsum(1), x.amax(1), x.std()
        x @ y.t(), torch.addmm(x[0, :6], x, y.t()), torch.bmm(x[None], y.t()[None])
        x.clone().add_(y).mul_(2).clamp_(-1, 1).masked_fill_(x > 0, -1e4)
        torch.add(x, y, out=torch.empty_like(x)), torch.cat([x, y]), torch.stack([x, y], 1)
        torch._foreach_add([x, y], [y, x], alpha=2), x.to(torch.float64), x.to(torch.int32)
        x.sort(-1), x.topk(3), x.argmax(1), x.max(0), x.median(), x.nonzero(), x > y, x == x
        x.gather(1, x.argsort(1)), x[x > 0], torch.where(x > y, x, y), x.tril(), x.flip(0)
        x[:0].sum(), x[:0] @ y.t(), x[0, 0] * y[0, 0], x.t()[::2].exp(), x[:, ::3].sum(1)
        F.conv2d(x[None, None], y[None, None, :3, :3]), F.max_pool2d(x[None], 2)
        F.dropout(x, 0.5), torch.randn(5, device=CHIP), torch.empty(5, device=CHIP)
    words = torch.arange(7, device=CHIP)
    words * 3, words // 2, words & 5, words.unique(), ~(words > 3), words.sum(), words.float()
    z = torch.complex(normal(3), normal(3, seed=1))
    z * z, z.abs(), z.conj() + 1


def test_right_kernels_pass() -> None:
    found = compared(everything)
    assert found.passed, found.summary
    assert failed(found) == [] and found.first_bad is None
    assert len(found.operators) > 100
    assert all(each.calls and each.threshold for each in found.operators)
    products = [each for each in found.operators if each.operator == "aten.mm.default"]
    assert {each.dtype for each in products} == {"float32", "bfloat16", "float16"}
    assert all(each.operator_class == "matmul" and each.errors.elements for each in products)
    drawn = [each for each in found.operators if each.operator_class == "random"]
    assert drawn and {each.threshold for each in drawn} == {"dtype and shape only"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Dropout(0.2), nn.Linear(32, 5)
    ).to(CHIP)


def train() -> list[Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(2):
        torch.manual_seed(step)
        loss = F.cross_entropy(net(normal(64, 8, seed=step)), torch.arange(64, device=CHIP) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [each.detach().cpu() for each in net.parameters()]


def test_the_program_computes_what_it_does_without() -> None:
    """A program gives the same results under Compare as without it, bit for bit.

    So in-place writes reach their tensors, operators with several outputs reach autograd, and
    random numbers are drawn only once.
    """
    bare = train()
    with Compare() as compare:
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    found = compare.findings()
    assert found.passed, found.summary
    names = {each.operator for each in found.operators}
    assert {"aten.native_layer_norm_backward.default", "aten.tanh_backward.default"} <= names


def test_functions_imported_by_name_are_seen() -> None:
    found = compared(lambda: relu(normal(4)))
    assert finding(found, "relu.default").calls == 1


def test_host_calls_are_counted_apart() -> None:
    def run() -> None:
        normal(4, 4) @ normal(4, 4)
        normal(4).erfinv()

    with FindOverflow():  # looks at results with kernels that the chip has not
        found = compared(run)
    assert finding(found, "mm.default").host_calls == 0
    assert finding(found, "erfinv.default").host_calls == 1


def test_ties_may_be_broken_either_way() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]], device=CHIP)

    def last_largest(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return (x.shape[dim] - 1 - x.cpu().flip(dim).argmax(dim, keepdim)).to(x.device)

    def smallest(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return x.cpu().argmin(dim, keepdim).to(x.device)

    def out_of_range(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return (x.cpu().argmax(dim, keepdim) + 7).to(x.device)

    with planted("argmax", last_largest):
        assert compared(lambda: x.argmax(1)).passed
    for wrong in (smallest, out_of_range):
        with planted("argmax", wrong):
            assert failed(compared(lambda: x.argmax(1))) == ["aten.argmax.default"]


# --- what is wrong is found and named ---------------------------------------------------------


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 16, bias=False)
        self.vocabulary = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.vocabulary(torch.cat([x, x], -1))


def accumulates_in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    """Wrong in one shape only."""
    x, y = a.cpu(), b.cpu()
    if x.shape[1] != 32:
        return (x @ y).to(a.device)
    total = torch.zeros(x.shape[0], y.shape[1])
    for k in range(0, 32, 4):
        total = (total + x[:, k : k + 4] @ y[k : k + 4]).bfloat16().float()
    return total.to(a.device)


def test_accumulation_in_bfloat16_in_one_shape() -> None:
    with planted("mm", accumulates_in_bfloat16):
        net, x = Head().to(CHIP), normal(4, 64)
        found = compared(lambda: net(x))
    bad = finding(found, "mm.default")
    assert failed(found) == ["aten.mm.default"]
    assert (bad.calls, bad.failed_calls) == (2, 1)
    assert found.first_bad is not None and found.first_bad.module == "vocabulary"
    assert "check_compare.py" in found.first_bad.source
    assert "in Head.forward" in found.first_bad.source
    assert bad.worst and bad.worst_where == bad.first_failed
    assert "aten.mm.default" in found.summary and "vocabulary" in found.summary


def test_a_backward_kernel_in_one_layer() -> None:
    calls = iter(range(100))

    def tanh_backward(gradient: Tensor, y: Tensor) -> Tensor:
        right = torch.ops.aten.tanh_backward(gradient.cpu(), y.cpu())
        return (right * (1.01 if next(calls) == 1 else 1)).to(gradient.device)

    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).to(CHIP)
    with planted("tanh_backward", tanh_backward):
        found = compared(lambda: net(normal(4, 8)).sum().backward())
    assert failed(found) == ["aten.tanh_backward.default"]
    assert found.first_bad is not None
    assert (found.first_bad.module, found.first_bad.phase) == ("1.1", "backward")


def test_an_in_place_operator_that_drops_its_write() -> None:
    x = normal(8)
    with planted("add_.Tensor", lambda x, y, alpha=1: x):
        found = compared(lambda: x.add_(1))
    assert failed(found) == ["aten.add_.Tensor"]
    assert finding(found, "add_.Tensor", "self").errors.beyond_threshold == 8


def test_a_list_operator_that_drops_a_write() -> None:
    def add(xs: list[Tensor], ys: list[Tensor], alpha: float = 1) -> None:
        xs[0].copy_(xs[0].cpu() + ys[0].cpu())

    with planted("_foreach_add_.List", add):
        found = compared(lambda: torch._foreach_add_([normal(3), normal(3)], [normal(3)] * 2))
    assert "aten._foreach_add_.List" in failed(found)


def test_a_twentieth_of_a_percent_of_wrong_elements() -> None:
    def silu(x: Tensor) -> Tensor:
        right = F.silu(x.cpu())
        right.view(-1)[::2000] *= 1.05
        return right.to(x.device)

    with planted("silu", silu):
        found = compared(lambda: F.silu(normal(100, 200)))
    bad = finding(found, "silu.default")
    assert not bad.passed and bad.errors.beyond_threshold == 10
    assert [each.index[1] for each in bad.worst] == [0] * 5


def test_an_input_that_is_changed() -> None:
    def exp(x: Tensor) -> Tensor:
        right = x.cpu().exp().to(x.device)
        x.mul_(2)
        return right

    with planted("exp", exp):
        found = compared(lambda: normal(8).exp())
    assert failed(found) == ["aten.exp.default"]
    assert finding(found, "exp.default", "out").passed
    assert "changed its input self" in found.first_bad_reason


def test_a_softmax_without_its_maximum() -> None:
    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        powers = x.cpu().exp()
        return (powers / powers.sum(dim, keepdim=True)).to(x.device)

    with planted("_softmax", softmax):
        assert compared(lambda: normal(4, 8).softmax(-1)).passed
        found = compared(lambda: (normal(4, 8) * 200).softmax(-1))
    assert failed(found) == ["aten._softmax.default"]
    assert "NaN or inf disagree" in found.first_bad_reason


@pytest.mark.parametrize("what", ["is float64, expected float32", "has shape [1, 4], expected [4]"])
def test_a_result_of_wrong_dtype_or_shape(what: str) -> None:
    def sin(x: Tensor) -> Tensor:
        right = x.cpu().sin()
        return (right.double() if "float64" in what else right[None]).to(x.device)

    with planted("sin", sin):
        found = compared(lambda: normal(4).sin())
    assert failed(found) == ["aten.sin.default"]
    assert what in found.first_bad_reason


def test_a_view_that_is_a_copy() -> None:
    with planted("unsqueeze", lambda x, dim: x.cpu().unsqueeze(dim).clone().to(x.device)):
        found = compared(lambda: normal(4).unsqueeze(0))
    assert failed(found) == ["aten.unsqueeze.default"]
    assert "is a copy, expected a view" in found.first_bad_reason


def test_the_first_bad_call_is_the_first_in_time() -> None:
    def cos(x: Tensor) -> Tensor:
        return (x.cpu().cos() + 1).to(x.device)

    def run() -> None:
        normal(3).exp(), normal(3).cos()
        normal(3).abs()
        normal(3).exp(), normal(3).cos()

    with planted("cos", cos), planted("abs", cos):
        found = compared(run)
    assert failed(found) == ["aten.abs.default", "aten.cos.default"]
    assert found.first_bad is not None
    assert (found.first_bad.operator, found.first_bad.index) == ("aten.cos.default", 0)


def test_an_operator_without_a_reference_is_said_not_to_be_compared() -> None:
    library = torch.library.Library("check_compare", "DEF")
    library.define("secret(Tensor x) -> Tensor")
    library.impl("secret", lambda x: x + 1, "PrivateUse1")
    found = compared(lambda: torch.ops.check_compare.secret(normal(3)))
    (secret,) = (each for each in found.operators if "secret" in each.operator)
    assert secret.threshold == "not compared"
    assert "the host cannot compute it" in secret.reason
    assert any("secret" in note and "1 call:" in note for note in found.notes)


def test_a_truth_of_the_hosts_own_dtype_is_said_to_be() -> None:
    def shy(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("not for float64")
        return x + 1

    library = torch.library.Library("check_compare", "FRAGMENT")
    library.define("shy(Tensor x) -> Tensor")
    library.impl("shy", shy, "CPU")
    library.impl("shy", lambda x: x + 1, "PrivateUse1")
    found = compared(lambda: torch.ops.check_compare.shy(normal(3)))
    said = "1 call: the truth is the host's in its own dtype: not for float64"
    assert found.notes == [f"check_compare.shy.default: {said}"]


# --- options ----------------------------------------------------------------------------------


def test_raising_at_the_first_failure() -> None:
    expected = pytest.raises(PrecisionError, match=r"aten\.cos\.default #0 .*beyond the threshold")
    with planted("cos", lambda x: x.clone()), Compare(on_failure="raise"), expected:
        normal(3).cos()


def test_one_call_in_so_many() -> None:
    x = normal(3)
    found = compared(lambda: [x.exp() for _ in range(7)], every=3)
    assert finding(found, "exp.default").calls == 3


def test_a_selection_of_operators() -> None:
    x = normal(3, 3)
    found = compared(lambda: (x.exp(), x @ x), operators="mm")
    assert {each.operator for each in found.operators} == {"aten.mm.default"}


def test_a_teams_standards(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[classes.transcendental]\nulps.float32 = 0\nroundings.float32 = 0\n")
    x = normal(100)
    assert compared(lambda: x.exp()).passed
    assert not compared(lambda: x.exp(), standards=own).passed


def test_findings_are_written_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compared(lambda: normal(3).exp())
    assert list(tmp_path.iterdir()) == []
    found = compared(lambda: normal(3).exp(), output=tmp_path / "there")
    assert read_findings(tmp_path / "there" / "compare-rank0.json") == found


@pytest.mark.parametrize("options", [{"every": 0}, {"on_failure": "ignore"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Compare(**options)
