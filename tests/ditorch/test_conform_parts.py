"""When values agree, and how a result is counted and shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ditorch.conform.agree import disagreement, is_identical, same_specials
from ditorch.conform.ambiguous import is_as_right
from ditorch.conform.arguments import copy_to, shared_memory
from ditorch.conform.operators import _calls, _database
from ditorch.conform.randomness import draws
from ditorch.conform.results import (
    CheckResult,
    Conformance,
    OperatorResult,
    Outcome,
    Settings,
    read_conformance,
    write_conformance,
)
from ditorch.conform.table import print_table, write_markdown
from ditorch.conform.variants import VARIANTS, SampleCall

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_values_agree_with_nan_and_inf_in_place(dtype: torch.dtype) -> None:
    value = torch.tensor([0.0, -0.0, 1.5, NAN, INF, -INF], dtype=dtype)
    assert disagreement(value, value.clone(), dtype) is None
    assert is_identical(value, value.clone()) and same_specials(value, value.clone())
    assert disagreement(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype), dtype) is None


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        ([1.0, NAN], [1.0, 2.0], "NaN in other places; at [1] nan, expected 2"),
        ([1.0, 2.0], [1.0, NAN], "NaN in other places; at [1] 2, expected nan"),
        ([INF, 2.0], [1.0, 2.0], "inf in other places; at [0] inf, expected 1"),
        ([INF, 2.0], [-INF, 2.0], "wrong values: 1 of 2; at [0] inf, expected -inf"),
        ([1.0, 2.5], [1.0, 2.0], "wrong values: 1 of 2; at [1] 2.5, expected 2"),
        ([1, 2], [1, 3], "wrong values; at [1] 2, expected 3"),
        ([True], [False], "wrong values; at [0] 1, expected 0"),
        (2.5, 2.0, "wrong values: 1 of 1; at [] 2.5, expected 2"),
        ([1 + 1j], [1 + NAN * 1j], "NaN in other places; at [0, 0] 1, expected nan"),
    ],
)
def test_a_disagreement_is_told_with_its_place(
    actual: object, expected: object, reason: str
) -> None:
    told = disagreement(torch.tensor(actual), torch.tensor(expected), torch.float32)
    assert told == reason


def test_one_wrong_element_in_a_million_is_seen() -> None:
    expected = torch.rand(1_000_000)
    actual = expected.clone()
    actual[765_432] += 0.01
    told = disagreement(actual, expected, torch.float32)
    assert told is not None and "1 of 1000000; at [765432]" in told


def test_what_is_wrong_with_small_values_is_seen() -> None:
    expected = torch.full((8,), 2e-6)
    assert disagreement(expected * 1.01, expected, torch.float32)
    assert disagreement(expected * (1 + 1e-6), expected, torch.float32) is None


def sample_of(name: str, dtype: str, **changes: Any) -> SampleCall:
    settings = Settings(operators=[], dtypes=[dtype], samples_per_dtype=1, seed=0)
    call = next(_calls(_database()[name], getattr(torch, dtype), VARIANTS[0], settings))
    return replace(call, **changes)


@pytest.mark.parametrize(
    ("indices", "kwargs", "right"),
    [
        ([2, 3, 1, 0], {}, True),
        ([2, 3, 1, 0], {"stable": True}, False),
        ([2, 3, 1, 1], {}, False),  # one is named twice
        ([3, 2, 1, 0], {}, False),  # another value
    ],
)
def test_any_of_equal_values_may_be_chosen(
    indices: list[int], kwargs: dict[str, bool], right: bool
) -> None:
    given = torch.tensor([1, 1, 0, 1], dtype=torch.int16)
    call = sample_of("sort", "int16", input=given, args=(), kwargs=kwargs)
    expected = torch.sort(given)
    found = (expected.values, torch.tensor(indices))
    assert is_as_right(found, tuple(expected), torch.int16, call) == right


def test_so_may_an_index_of_equal_values() -> None:
    given = torch.tensor([1, 1, 0, 1], dtype=torch.int16)
    call = sample_of("argsort", "int16", input=given, args=(), kwargs={})
    for indices, right in (([2, 3, 1, 0], True), ([3, 2, 1, 0], False)):
        assert is_as_right(torch.tensor(indices), given.argsort(), torch.int16, call) == right


@pytest.mark.parametrize("name", ["linalg.eig", "linalg.eigh"])
def test_vectors_may_have_another_sign(name: str) -> None:
    call = sample_of(name, "float64")
    values, vectors = call.operator.op(call.input, *call.args, **call.kwargs)
    expected = values, vectors
    assert is_as_right((values, -vectors), expected, torch.float64, call)
    assert not is_as_right((values, 0.1 - vectors), expected, torch.float64, call)


@pytest.mark.parametrize(
    ("name", "drew"), [("randn", True), ("multinomial", True), ("add", False), ("sort", False)]
)
def test_operators_that_draw_are_told_from_others(name: str, drew: bool) -> None:
    assert draws(sample_of(name, "float32")) == drew


def test_arguments_are_copied_as_they_are() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    given = (base.t()[1:], base[::2], base, torch.tensor([1 + 2j]).conj())
    copied, again = copy_to(given, CPU), copy_to(given, CPU)
    for old, new in zip(given, copied, strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride()
        assert old.storage_offset() == new.storage_offset() and old.is_conj() == new.is_conj()
    copied[2].zero_()
    assert copied[0].sum() == 0 and base.sum() > 0
    assert shared_memory(copied[0], copied) == {(0, 0), (0, 1), (0, 2)}
    assert shared_memory(copied[0], again) == set()


def _conformance() -> Conformance:
    found = Conformance("B", "B", "emuchip", "2.x", "conform", Settings([], [], 2, 0), 12.0)
    found.checks = [
        CheckResult("memory", "a freed block is used again", "passed"),
        CheckResult("stream", "an event waits", "failed", "it does not wait"),
        CheckResult("device", "device to device copies", "unsupported", "it has one device"),
    ]
    good, bad, refused = OperatorResult("mm"), OperatorResult("linalg.inv"), OperatorResult("none")
    good.record(Outcome("float32", "function", 0, "passed", computed_by="chip"))
    good.record(Outcome("float32", "gradient", 0, "passed", computed_by="both"))
    good.kernels, good.fallbacks = {"mm": 3}, {"fill_": 1}
    bad.record(Outcome("float32", "function", 0, "failed", "wrong values: 1 of 4", "host"))
    bad.record(Outcome("bfloat16", "function", 0, "unsupported", "no such dtype"))
    refused.refused_by_cpu = 4
    found.operators = [good, bad, refused]
    return found


def test_samples_are_counted_apart_by_status(tmp_path: Path) -> None:
    found = _conformance()
    tally = found.tally
    assert (tally.passed, tally.failed, tally.unsupported, tally.supported) == (2, 1, 1, 3)
    assert found.pass_rate == pytest.approx(2 / 3)
    assert [operator.name for operator in found.covered] == ["mm", "linalg.inv"]
    write_conformance(found, tmp_path / "a" / "result.json")
    assert read_conformance(tmp_path / "a" / "result.json") == found
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["result.json"]


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is not a conformance result"):
        read_conformance(tmp_path / "x.json")


def test_table_and_page_tell_counts_failures_and_reasons(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    print_table(_conformance(), console)
    write_markdown(_conformance(), tmp_path / "page.md")
    table, page = console.export_text(), (tmp_path / "page.md").read_text()
    for text in (table, page):
        assert "2 of 3 covered; of 3 supported samples 2 passed (66.66%)" in text
        assert "`linalg.inv`, function, float32 (1 sample): wrong values: 1 of 4" in text
        assert "runtime, stream: an event waits: it does not wait" in text
        assert "Runtime: 1 checks passed, 1 failed, 1 unsupported." in text
    assert "no such dtype (1 samples): `linalg.inv` (1)" in page
    assert "refused by the CPU, so never checked: `none`" in page
    assert "| by the chip's kernels alone | 1 |" in page
    assert "| `mm` | 3 |" in page
