"""The standards and the verdict: what passes, what does not, and why."""

from __future__ import annotations

import math
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ditorch.precision.errors import differences, errors_of
from ditorch.precision.results import Errors
from ditorch.precision.standards import Standards, load_standards, operator_names
from ditorch.precision.verdict import Judgement, judge

STANDARDS = load_standards()
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NARROW = FLOATS[1:]
COMPARED = [name for name, each in STANDARDS.classes.items() if each.rule != "not compared"]


def verdict(
    operator: str, actual: Tensor, expected: Tensor, *, standards: Standards = STANDARDS, **more
) -> Judgement:
    more.setdefault("dtype", actual.dtype)
    return judge(f"aten.{operator}.default", "out", actual, expected, standards=standards, **more)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- errors -----------------------------------------------------------------------------------


def test_the_truth_is_not_rounded_to_the_dtype_first() -> None:
    """A quarter of an ulp off: rounded to bfloat16 first, the truth would be 1, the error 0."""
    found = errors_of(differences(torch.ones(1).bfloat16(), torch.tensor([1 + 2**-9]).double()))
    assert found.max_abs == 2**-9
    assert found.max_ulp == 0.25


def test_statistics_agree_with_numpy() -> None:
    truth = normal(7, 11)
    ours = (truth * (1 + 1e-5 * normal(7, 11, seed=1))).float()
    found = errors_of(differences(ours, truth))
    expected = truth.numpy()
    error = np.abs(ours.numpy().astype(np.float64) - expected)
    relative = error / np.abs(expected)
    assert found.elements == 77
    assert found.max_abs == error.max()
    assert found.max_rel == pytest.approx(relative.max())
    assert found.mean_rel == pytest.approx(relative.mean())
    assert found.rmse == pytest.approx(np.sqrt((error**2).mean()))
    ulps = error / np.spacing(np.abs(expected).astype(np.float32))
    assert found.max_ulp == pytest.approx(ulps.max(), rel=0.01)
    edges = [0, 1e-300, *(10.0**-power for power in range(16, -1, -1)), math.inf]
    assert found.histogram == np.histogram(relative, edges)[0].tolist()


@pytest.mark.parametrize("dtype", NARROW)
def test_ulps_are_the_spacing_of_the_tensors_own_dtype(dtype: torch.dtype) -> None:
    for value in (1.0, 1.5, 0.03, 300.0, torch.finfo(dtype).tiny):
        here = torch.tensor([value], dtype=dtype)
        there = torch.nextafter(here, torch.tensor([math.inf], dtype=dtype))
        assert errors_of(differences(there, here.double())).max_ulp == 1.0


# --- any tensor -------------------------------------------------------------------------------


def test_empty_and_zero_dimensional_tensors() -> None:
    assert verdict("mm", torch.empty(0, 4), torch.empty(0, 4).double()).passed
    assert verdict("exp", torch.tensor(1.0), torch.tensor(1.0).double()).passed
    wrong = verdict("exp", torch.tensor(1.1), torch.tensor(1.0).double())
    assert not wrong.passed and wrong.worst[0].index == []


def test_non_contiguous_tensors_keep_their_indices() -> None:
    truth = normal(5, 3).t()
    ours = truth.float()
    assert not ours.is_contiguous() and verdict("exp", ours, truth).passed
    ours[2, 4] += 0.5
    assert verdict("exp", ours, truth).worst[0].index == [2, 4]


def test_integers_are_equal_or_wrong_even_beyond_float64s_precision() -> None:
    truth = torch.tensor([2**53, -3])
    assert verdict("add", truth.clone(), truth).passed
    found = verdict("add", truth + torch.tensor([1, 0]), truth)
    assert not found.passed and found.errors.beyond_threshold == 1


def test_booleans() -> None:
    truth = torch.tensor([True, False])
    assert verdict("logical_and", truth.clone(), truth).passed
    assert not verdict("logical_and", ~truth, truth).passed


def test_complex_numbers() -> None:
    truth = torch.complex(normal(50), normal(50, seed=1))
    ours = truth.to(torch.complex64)
    assert verdict("mm", ours, truth).passed
    ours[7] += 1e-3j
    assert not verdict("mm", ours, truth).passed
    ours[7] = complex(math.nan, 0)
    assert "NaN" in verdict("mm", ours, truth).reason


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("ours", "truth", "passes"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, -math.inf, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
        (-math.inf, math.inf, False),
        (math.nan, math.inf, False),
    ],
)
@pytest.mark.parametrize("operator", ["mm", "exp", "add", "clone", "_softmax", "unheard_of"])
def test_nan_and_inf_have_to_agree(
    operator: str, dtype: torch.dtype, ours: float, truth: float, passes: bool
) -> None:
    actual = torch.tensor([1.0, ours], dtype=dtype)
    found = verdict(operator, actual, torch.tensor([1.0, truth]).double())
    assert found.passed is passes
    assert passes or "NaN or inf disagree in 1 of 2 elements" in found.reason


def test_a_truth_beyond_the_dtypes_range_is_infinite() -> None:
    truth = torch.tensor([70000.0, -1e6]).double()
    assert verdict("mm", torch.tensor([math.inf, -math.inf]).half(), truth).passed
    assert not verdict("mm", torch.tensor([65504.0, -math.inf]).half(), truth).passed
    assert not verdict("mm", torch.tensor([math.inf, math.inf]).half(), truth).passed


def test_subnormal_numbers_may_be_flushed_except_in_float16() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tiny = torch.finfo(dtype).tiny
        assert verdict("mm", torch.zeros(1, dtype=dtype), torch.tensor([tiny / 2]).double()).passed
        assert not verdict(
            "mm", torch.zeros(1, dtype=dtype), torch.tensor([tiny * 8]).double()
        ).passed
    assert not verdict("mm", torch.zeros(1).half(), torch.tensor([3e-5]).double()).passed


def test_a_copy_flushes_nothing() -> None:
    truth = torch.tensor([1e-40]).double()
    assert verdict("clone", truth.float(), truth.float().double()).passed
    assert not verdict("clone", torch.zeros(1), truth.float().double()).passed


# --- no element is averaged away --------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", COMPARED)
def test_a_twentieth_of_a_percent_of_wrong_elements_fails(name: str, dtype: torch.dtype) -> None:
    operator = {"composite": "unheard_of"}.get(name) or STANDARDS.classes[name].operators[0]
    truth = 1 + normal(40_000).abs()
    right = truth.to(dtype)
    exact = right.double() if name == "bitwise" else truth
    assert verdict(operator, right, exact).passed
    wrong = right.clone()
    wrong[::2000] *= 1.05
    found = verdict(operator, wrong, exact)
    assert not found.passed
    assert found.errors.beyond_threshold == 20
    assert "20 of 40000 elements" in found.reason


def test_bitwise_operators_allow_no_bit() -> None:
    truth = normal(100).float()
    ours = truth.clone()
    ours[3] = torch.nextafter(ours[3], torch.tensor(9.0))
    found = verdict("cat", ours, truth.double())
    assert not found.passed and found.threshold == "equal"


def test_wrong_shape_and_wrong_dtype_are_named() -> None:
    truth = normal(3, 2)
    assert "shape [2, 3], expected [3, 2]" in verdict("mm", truth.t().float(), truth).reason
    found = verdict("mm", truth.half(), truth, dtype=torch.float32)
    assert not found.passed and "is float16, expected float32" in found.reason


def test_random_numbers_are_judged_by_shape_and_dtype_only() -> None:
    assert verdict("bernoulli", torch.ones(3), torch.zeros(3)).passed
    assert not verdict("bernoulli", torch.ones(3), torch.zeros(4)).passed
    assert not verdict("bernoulli", torch.ones(3), torch.zeros(3), dtype=torch.float16).passed


@pytest.mark.parametrize("operator", ["silu_backward", "native_layer_norm_backward", "mul", "mm"])
def test_a_gradient_is_judged_by_its_own_dtype(operator: str) -> None:
    """float32 gradients may not have bfloat16's errors; bfloat16 ones are not held to float32's."""
    truth = 1 + normal(1000).abs()
    assert verdict(operator, truth.bfloat16(), truth).passed
    assert not verdict(operator, truth.bfloat16().float(), truth).passed


# --- tight enough, and not too tight ----------------------------------------------------------


def product(a: Tensor, b: Tensor, accumulate: torch.dtype, block: int) -> Tensor:
    """a @ b, each block of k added to a running sum in `accumulate`."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=accumulate)
    for k in range(0, a.shape[1], block):
        part = a[:, k : k + block].float() @ b[k : k + block].float()
        total = (total.float() + part).to(accumulate)
    return total.to(a.dtype)


def judge_product(ours: Tensor, a: Tensor, b: Tensor) -> Judgement:
    a, b = a.double(), b.double()
    return verdict("mm", ours, a @ b, reduction_length=a.shape[1], scale=a.abs() @ b.abs())


@pytest.mark.parametrize("k", [64, 256, 1024])
@pytest.mark.parametrize("dtype", NARROW)
def test_products_accumulated_in_16_bits_fail(dtype: torch.dtype, k: int) -> None:
    a, b = normal(32, k).to(dtype), normal(k, 32, seed=1).to(dtype)
    for accumulate in (torch.bfloat16, torch.float16):
        assert not judge_product(product(a, b, accumulate, block=8), a, b).passed


@pytest.mark.parametrize("k", [1, 2, 64, 1000])
@pytest.mark.parametrize("dtype", NARROW)
def test_products_accumulated_in_float32_pass_in_any_order(dtype: torch.dtype, k: int) -> None:
    for a, b in (
        (normal(16, k).to(dtype), normal(k, 16, seed=1).to(dtype)),
        (normal(16, k).abs().to(dtype), normal(k, 16, seed=1).abs().to(dtype)),
    ):
        for block in (1, 7, k):
            found = judge_product(product(a, b, torch.float32, block), a, b)
            assert found.passed
            assert found.errors.worst_share_of_threshold < 0.6


def test_products_of_inputs_rounded_to_tf32_fail() -> None:
    a, b = normal(32, 64).float(), normal(64, 32, seed=1).float()
    short = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (a, b)]
    assert not judge_product(product(*short, torch.float32, 64), a, b).passed


@pytest.mark.parametrize("dtype", NARROW)
def test_a_softmax_that_overflows_fails(dtype: torch.dtype) -> None:
    x = (100 * normal(8, 32)).to(dtype)
    powers = x.float().exp().to(dtype)
    naive = powers / powers.sum(-1, keepdim=True)
    assert not verdict("_softmax", naive, x.double().softmax(-1)).passed
    assert verdict("_softmax", x.softmax(-1), x.double().softmax(-1)).passed


# --- against a reference GPU ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("importance", "times", "passes"),
    [
        ("minor", 1.9, True), ("minor", 2.1, False),
        ("major", 1.4, True), ("major", 1.6, False),
        ("critical", 1.1, True), ("critical", 1.3, False),
    ],
)  # fmt: skip
def test_the_ratio_to_the_references_own_error_by_importance(
    tmp_path: Path, importance: str, times: float, passes: bool
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(f'[operators.mm]\nimportance = "{importance}"\n')
    standards = load_standards(own)
    truth = 1 + normal(1000).abs()
    ours = (truth * (1 + 2e-6)).float()  # most of what is allowed without a scale
    long = {"reduction_length": 64}
    errors = verdict("mm", ours, truth, **long).errors
    assert errors.worst_share_of_threshold < 1 and errors.max_ulp > 1
    reference = Errors(
        elements=1000,
        max_abs=errors.max_abs,
        max_rel=errors.max_rel / times,
        mean_rel=errors.mean_rel / times,
        rmse=errors.rmse / times,
    )
    found = verdict("mm", ours, truth, standards=standards, reference_error=reference, **long)
    assert found.passed is passes
    assert passes or f"an operator of {importance} importance" in found.reason


def test_errors_of_less_than_an_ulp_need_no_reference() -> None:
    truth = 1 + normal(1000).abs()
    assert verdict("mm", truth.float(), truth, reference_error=Errors(elements=1000)).passed


def test_a_bad_reference_excuses_nothing() -> None:
    truth = 1 + normal(1000).abs()
    reference = Errors(elements=1000, max_rel=1.0, mean_rel=1.0, rmse=1.0)
    assert not verdict("mm", truth.half().float(), truth, reference_error=reference).passed


# --- the table --------------------------------------------------------------------------------


def torch_operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    full = [each.replace("::", ".") for each in names]
    return {name for each in full for name in operator_names(each)}


def test_every_operator_in_the_table_is_one_of_torchs() -> None:
    known = torch_operators()
    named = [p for each in STANDARDS.classes.values() for p in each.operators]
    exceptions = [part.strip() for key in STANDARDS.operators for part in key.split(",")]
    for pattern in [*named, *exceptions]:
        assert any(fnmatchcase(name, pattern) for name in known), pattern


def test_no_operator_is_named_by_two_classes() -> None:
    counts = Counter(p for each in STANDARDS.classes.values() for p in each.operators)
    assert [pattern for pattern, count in counts.items() if count > 1] == []


def test_no_product_sum_or_softmax_may_accumulate_in_16_bits() -> None:
    names = [name for name in torch_operators() if STANDARDS.class_of(name) == "matmul"]
    names += ["_softmax", "_log_softmax_backward_data", "sum", "mean", "native_layer_norm", "norm"]
    assert len(names) > 100
    assert [each for each in names if STANDARDS.numbers_of(each).keeps != "wide"] == []


def test_all_forms_of_an_operator_have_its_tolerances() -> None:
    for forms in (
        ["mm.default", "mm.out"],
        ["add.Tensor", "add_.Tensor", "_foreach_add.List", "_foreach_add_.Scalar", "add.out"],
        ["_softmax.default", "_softmax_backward_data.default", "_log_softmax.out"],
        ["mul.Scalar", "mul_.Tensor", "_foreach_mul_.ScalarList"],
        ["__and__.Tensor", "__iand__.Tensor", "bitwise_and.Tensor"],
    ):
        classes = {STANDARDS.class_of(f"aten.{form}") for form in forms}
        assert len(classes) == 1 and "composite" not in classes, forms


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.add(str(func))
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(16), nn.LayerNorm(16)])
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 8)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3)
                         .reshape(x.shape))  # fmt: skip
        return x + self.down(F.silu(self.up(self.norms[1](x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_operator_of_a_training_step_is_named_in_the_table(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), Layer(), nn.Dropout(0.1), nn.Linear(16, 20))
    model.to(dtype)
    tokens = torch.randint(20, (2, 8))
    with Seen() as seen:
        for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert len(seen.operators) > 40
    named = [each for each in seen.operators if not each.startswith("profiler.")]
    assert [each for each in sorted(named) if not STANDARDS.is_listed(each)] == []


# --- a team's own file ------------------------------------------------------------------------


def test_a_team_overrides_single_numbers(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        "[classes.matmul.ulps]\nbfloat16 = 3\n"
        '[operators."*softmax*"]\nroundings.float32 = 7\n'
        '[operators.gelu]\nclass = "composite"\n'
    )
    ours = load_standards(own)
    matmul = ours.classes["matmul"]
    assert (matmul.ulps.bfloat16, matmul.sums) == (3, STANDARDS.classes["matmul"].sums)
    assert matmul.ulps.float32 == STANDARDS.classes["matmul"].ulps.float32
    softmax = ours.numbers_of("aten._softmax.default")
    assert softmax.roundings.float32 == 7
    assert softmax.roundings.float16 == STANDARDS.classes["softmax"].roundings.float16
    assert ours.class_of("aten.gelu.default") == "composite"
    assert ours.class_of("aten.mm.default") == "matmul"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[classes.matmull]\nsums = 1\n", "classes.matmull: unknown class"),
        ('[operators.mm]\nclass = "nosuch"\n', "operators.mm.class: unknown class"),
        ("[classes.matmul]\nulp = 1\n", "classes.matmul.ulp"),
        ("[classes.matmul.ulps]\nfloat31 = 1\n", "classes.matmul.ulps.float31"),
        ("[classes.matmul.ulps]\nfloat32 = -1\n", "classes.matmul.ulps.float32"),
        ('[classes.matmul.ulps]\nfloat32 = "many"\n', "classes.matmul.ulps.float32"),
        ("[importance.huge]\nrmse = 1\n", "importance.huge"),
        ('[operators.mm]\nimportance = "huge"\n', "operators.mm.importance"),
        ("tolerance = 1\n", "tolerance"),
        ("classes = 3\n", "classes: expected a table of tables"),
        ("[classes\n", "Expected"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(ValueError) as raised:
        load_standards(own)
    message = str(raised.value)
    assert message.startswith(f"{own}: ") and complaint in message and "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read: No such file"):
        load_standards(tmp_path / "none.toml")
