"""Findings of two chips as the tools would write them, for tests of the report.

python tests/ditorch/sample_findings.py DIRECTORY [OPERATORS]
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from ditorch.conform.results import (
    CheckResult,
    Conformance,
    OperatorResult,
    Outcome,
    Settings,
    write_conformance,
)
from ditorch.precision.results import (
    Element,
    Errors,
    Findings,
    LossCurve,
    OperatorFinding,
    OperatorTime,
    Overflow,
    Where,
    write_findings,
)

GOOD, FAULTY = "vendor A, A-MINI", "vendor B, B-MINI"

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
)

_NAMES = ["mm", "addmm", "bmm", "softmax", "native_layer_norm", "add.Tensor", "mul.Tensor", "silu",
          "_foreach_add_.List", "embedding", "sum.dim_IntList", "mean.dim", "rsqrt"]  # fmt: skip

FIRST_BAD = Where(
    rank=1, step=3, phase="forward", module="layers.2.attention", operator="aten._softmax.default",
    index=0, function="torch.nn.functional.softmax", source="model.py:41 in Attention.forward",
)  # fmt: skip


def write_sample(directory: Path, operators: int = 40) -> None:
    """Chip A passes on two ranks; chip B fails in one softmax, overflows, and its loss departs."""
    random.seed(0)
    for rank in (0, 1):
        found = [_finding(i, rank) for i in range(operators)]
        write_findings(_compare(GOOD, rank, found), directory / "a")
        found = [*found[1:], _failed() if rank == 1 else found[0]]
        write_findings(_compare(FAULTY, rank, found), directory / "b")
    for chip, name, drift in ((GOOD, "a", 0.002), (FAULTY, "b", 0.03)):
        write_findings(_loss(chip, drift), directory / name)
        write_findings(_time(chip), directory / name)
    write_findings(_overflow(), directory / "b")
    write_conformance(sample_conformance(), directory / "a" / "conformance.json")


def _finding(i: int, rank: int) -> OperatorFinding:
    name = _NAMES[i % len(_NAMES)] + (f"_{i}" if i >= len(_NAMES) else "")
    dtype = ("float32", "bfloat16")[i % 2]
    scale = 10 ** random.uniform(-1, 1) * (1e-7 if dtype == "float32" else 4e-3)
    return OperatorFinding(
        operator=f"aten.{name}",
        operator_class="reduction" if i % 3 else "elementwise",
        dtype=dtype,
        calls=300,
        errors=_errors(scale, share=random.uniform(0.05, 0.9)),
        reference_errors=_errors(scale / random.uniform(0.8, 2.5), 0.3) if i % 2 else None,
        threshold="|error| <= 1.2e-06 |expected| + 3.1e-07 scale",
        worst=[Element(index=[3, i], actual=1.0 + scale, expected=1.0, error=scale)],
        worst_where=Where(
            rank=rank, step=2, phase="backward", module=f"layers.{i % 8}.mlp", operator=name,
            source="model.py:58 in MLP.forward",
        ),
        host_calls=300 if "foreach" in name or "embedding" in name else 0,
    )  # fmt: skip


def _errors(scale: float, share: float) -> Errors:
    middle = int(math.log10(scale)) + 16
    histogram = [0] * 19
    histogram[0] = 220_000
    for i in range(1, 19):
        histogram[i] = int(1e6 * math.exp(-((i - middle) ** 2) / 1.5)) if i <= middle + 2 else 0
    return Errors(
        elements=sum(histogram), max_abs=scale * 3, max_rel=scale * 10, mean_rel=scale / 3,
        rmse=scale, max_ulp=share * 4, worst_share_of_threshold=share, histogram=histogram,
    )  # fmt: skip


def _failed() -> OperatorFinding:
    errors = _errors(1e-7, 0.5)
    errors.histogram[18] = 512
    errors.worst_share_of_threshold, errors.beyond_threshold = math.inf, 512
    errors.max_rel = errors.max_abs = math.nan
    return OperatorFinding(
        operator="aten._softmax.default", operator_class="softmax", dtype="float32", calls=900,
        failed_calls=12, errors=errors, reference_errors=_errors(1e-7, 0.3), passed=False,
        threshold="|error| <= 4e-06 |expected| + 1e-07",
        reason="NaN in 512 elements where the reference has finite values",
        first_failed=FIRST_BAD,
        worst=[Element(index=[0, 2, 7, 1], actual=math.nan, expected=0.25, error=math.nan),
               Element(index=[0, 2, 7, 2], actual=math.inf, expected=0.125, error=math.inf)],
    )  # fmt: skip


def _compare(chip: str, rank: int, found: list[OperatorFinding]) -> Findings:
    failed = [each for each in found if not each.passed]
    hostile = found[5].model_copy(
        update={"operator": HOSTILE, "worst_where": Where(module=HOSTILE, source=HOSTILE)}
    )
    return Findings(
        tool="compare", rank=rank, device="emuchip:0", chip=chip, reference="cpu float64",
        steps=300, passed=not failed, operators=[*found, hostile],
        summary="aten._softmax.default departs from cpu float64 in layers.2.attention"
        if failed else f"{len(found)} operators agree with cpu float64",
        first_bad=FIRST_BAD if failed else None,
        first_bad_reason=failed[0].reason if failed else "",
        notes=[f"a note about {HOSTILE}"],
    )  # fmt: skip


def _loss(chip: str, drift: float) -> Findings:
    random.seed(1)
    reference = [9.5 * math.exp(-i / 60) + 2.1 + random.gauss(0, 0.05) for i in range(300)]
    losses = [y * (1 + drift * min(1, i / 100) * random.random()) for i, y in enumerate(reference)]
    error = sum(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) / len(losses)
    return Findings(
        tool="loss", device="emuchip:0", chip=chip, reference="cpu", steps=300,
        losses=[LossCurve(name="cpu", losses=reference), LossCurve(name=chip, losses=losses)],
        mean_relative_error=error, passed=error < 0.015,
        summary=f"mean relative error of the losses {error:.3%}, has to be below 1.5%",
    )  # fmt: skip


def _time(chip: str) -> Findings:
    times = [
        OperatorTime(operator=f"aten.{name}", calls=300, total_s=1.0 / i, mean_s=1.0 / i / 300,
                     max_s=2.0 / i / 300, host_calls=300 if name == "embedding" else 0)
        for i, name in enumerate(_NAMES, 1)
    ]  # fmt: skip
    return Findings(
        tool="time", device="emuchip:0", chip=chip, times=times, steps=300,
        fallbacks={"aten.embedding": 300}, summary="1.9 s in 3900 calls",
    )  # fmt: skip


def _overflow() -> Findings:
    where = FIRST_BAD.model_copy(update={"operator": "aten.sum.dim_IntList", "step": 4})
    found = Overflow(where=where, tensor="out", kind="inf", elements=3, largest_input=65504.0)
    return Findings(
        tool="overflow", rank=1, device="emuchip:0", chip=FAULTY, overflows=[found], passed=False,
        first_bad=where, first_bad_reason="3 elements of out are inf, of inputs up to 65504",
        summary="aten.sum.dim_IntList overflows in layers.2.attention",
    )  # fmt: skip


def sample_conformance() -> Conformance:
    softmax = OperatorResult("softmax")
    for sample in range(199):
        softmax.record(Outcome("float32", "forward", sample, "passed", computed_by="chip"))
    softmax.record(Outcome("float32", "backward", 0, "failed", "gradient departs", "chip"))
    for dtype in ("complex64", "complex128"):
        softmax.record(Outcome(dtype, "forward", 0, "unsupported", f"not for complex {HOSTILE}"))
    checks = [
        CheckResult("streams", "order", "passed"),
        CheckResult("memory", "peer access", "unsupported", "one chip only"),
    ]
    return Conformance(
        vendor="vendor A", chip_type="A-MINI", device="emuchip", torch_version="2.13",
        command="ditorch-align conform", settings=Settings([], [], 2, 0), checks=checks,
        operators=[softmax],
    )  # fmt: skip


if __name__ == "__main__":
    write_sample(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40)
