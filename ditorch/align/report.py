"""The report: everything found under a directory, by chip, with a verdict for each chip.

`Report` is the format of report.json. Findings of one tool on several ranks become one row per
operator, tensor and dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ditorch.precision.errors import merged, size
from ditorch.precision.results import (
    Element,
    Findings,
    LossCurve,
    OperatorFinding,
    OperatorTime,
    Overflow,
    Where,
)

_PHASES = ("forward", "recompute", "backward", "optimizer")
_WORST_KEPT = 10
_NO_THRESHOLD = ("", "not compared")


class _ReportModel(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True)


class OperatorRow(OperatorFinding):
    """One operator, result and dtype under one tool, over all ranks of a chip."""

    tool: str
    ranks: list[int]


class ToolResult(_ReportModel):
    """What one tool says on one rank."""

    tool: str
    rank: int
    passed: bool
    summary: str


class FirstBad(_ReportModel):
    """The first place where a tool objects, and why."""

    tool: str
    where: Where
    reason: str


class OperatorRuns(_ReportModel):
    """Who computed an operator: the chip's kernel or, for lack of one, the host."""

    operator: str
    chip_calls: int
    host_calls: int


class ConformanceProblem(_ReportModel):
    """A sample or check that did not pass."""

    operator: str
    dtype: str = ""
    variant: str = ""
    status: Literal["failed", "unsupported"]
    reason: str


class ConformanceSummary(_ReportModel):
    """The result of `ditorch-align conform`.

    A sample is one input of an operator, of one dtype, for one variant of the operator.
    """

    operators: int  # with at least one supported sample
    samples_passed: int
    samples_failed: int
    samples_unsupported: int
    checks_passed: int  # of the runtime part
    checks_failed: int
    checks_unsupported: int
    computed_by: dict[str, int] = {}  # samples by "chip", "host", "both", "neither" (views)
    problems: list[ConformanceProblem]

    @property
    def pass_rate(self) -> float:
        """The fraction of the supported samples that passed; 1 if none is supported."""
        supported = self.samples_passed + self.samples_failed
        return self.samples_passed / supported if supported else 1.0

    @property
    def passed(self) -> bool:
        return self.pass_rate >= CONFORMANCE_BAR and self.checks_failed == 0


CONFORMANCE_BAR = 0.99
"""The share of supported samples that has to pass."""


class ChipReport(_ReportModel):
    """Everything about one chip."""

    chip: str
    device: str = ""
    reference: str = ""
    passed: bool = True
    verdict: str = ""  # one sentence
    ranks: list[int] = []
    steps: int = 0
    tools: list[ToolResult] = []
    first_bad: FirstBad | None = None  # the earliest in the program
    operators: list[OperatorRow] = []
    overflows: list[Overflow] = []
    runs: list[OperatorRuns] = []
    times: list[OperatorTime] = []  # summed over ranks
    losses: list[LossCurve] = []
    mean_relative_error: float | None = None  # the largest, of its loss findings
    guilty: list[str] = []
    guilty_modules: list[str] = []
    conformance: ConformanceSummary | None = None
    notes: list[str] = []


class Report(_ReportModel):
    """report.json."""

    version: Literal[1] = 1
    passed: bool
    verdict: str  # one sentence
    chips: list[ChipReport]


def make_report(
    findings: Iterable[Findings], conformances: Iterable[tuple[str, ConformanceSummary]] = ()
) -> Report:
    """Brings together what tools found on any chips and ranks.

    Args:
        conformances: (chip, summary) of each conformance run.
    """
    by_chip: dict[str, list[Findings]] = defaultdict(list)
    for each in findings:
        by_chip[each.chip or each.device or "unnamed chip"].append(each)
    judged = {chip: found for chip, found in by_chip.items() if any(map(_judges, found))}
    by_chip = judged or by_chip  # a run that is only a reference is no chip on trial
    chips = {chip: _chip_report(chip, found) for chip, found in by_chip.items()}
    for chip, conformance in conformances:
        chips.setdefault(chip, ChipReport(chip=chip)).conformance = conformance
    for chip_report in chips.values():
        _judge(chip_report)
    ordered = sorted(chips.values(), key=lambda each: each.chip)
    failed = [each.chip for each in ordered if not each.passed]
    verdict = (
        f"{len(failed)} of {_count(len(ordered), 'chip')} failed: {'; '.join(failed)}"
        if failed
        else f"{_count(len(ordered), 'chip')} passed"
    )
    return Report(passed=not failed, verdict=verdict, chips=ordered)


def _chip_report(chip: str, findings: list[Findings]) -> ChipReport:
    findings = sorted(findings, key=lambda each: (each.tool, each.rank))
    mres = [f.mean_relative_error for f in findings if f.mean_relative_error is not None]
    return ChipReport(
        chip=chip,
        device=_first(each.device for each in findings),
        reference=_first(each.reference for each in findings),
        passed=all(each.passed for each in findings),
        ranks=sorted({each.rank for each in findings}),
        steps=max(each.steps for each in findings),
        tools=[
            ToolResult(tool=f.tool, rank=f.rank, passed=f.passed, summary=f.summary)
            for f in findings
        ],
        first_bad=_first_bad(findings),
        operators=_operator_rows(findings),
        overflows=sorted((o for f in findings for o in f.overflows), key=lambda o: _order(o.where)),
        runs=_runs(findings),
        times=_times(findings),
        losses=_longest(curve for each in findings for curve in each.losses),
        mean_relative_error=max(mres, key=size) if mres else None,
        guilty=sorted({operator for each in findings for operator in each.guilty}),
        guilty_modules=sorted({module for each in findings for module in each.guilty_modules}),
        notes=list(dict.fromkeys(note for each in findings for note in each.notes)),
    )


def _judges(findings: Findings) -> bool:
    """A run's losses or a capture by themselves are neither good nor bad."""
    return findings.tool not in ("loss", "capture") or findings.mean_relative_error is not None


def _longest(curves: Iterable[LossCurve]) -> list[LossCurve]:
    """One of each name; the tools look on in runs of few steps."""
    longest: dict[str, LossCurve] = {}
    for curve in curves:
        known = longest.get(curve.name)
        if known is None or len(curve.losses) > len(known.losses):
            longest[curve.name] = curve
    return list(longest.values())


def _judge(chip: ChipReport) -> None:
    """Fills in `passed` and the sentence."""
    objections = [t.summary or f"{t.tool} did not pass" for t in chip.tools if not t.passed]
    conformance = chip.conformance
    if conformance and not conformance.passed:
        objections.append(
            f"{conformance.pass_rate:.2%} of the supported samples conform, "
            f"{CONFORMANCE_BAR:.0%} have to, and {conformance.checks_failed} runtime checks fail"
        )
    chip.passed = not objections
    if objections:
        more = len(objections) - 1
        chip.verdict = objections[0] + (f" (and {_count(more, 'more objection')})" if more else "")
        return
    said = []
    if chip.mean_relative_error is not None:
        said.append(f"losses within {chip.mean_relative_error:.3%} of the reference's")
    if judged := [row for row in chip.operators if row.threshold not in _NO_THRESHOLD]:
        said.append(f"{_count(len(judged), 'operator result')} within their thresholds")
    if conformance:
        said.append(f"{conformance.pass_rate:.2%} of the supported samples conform")
    others = _count(len({each.tool for each in chip.tools}), "tool")
    chip.verdict = "; ".join(said) or f"nothing objected to by {others}"


def _first_bad(findings: Iterable[Findings]) -> FirstBad | None:
    bad = [
        FirstBad(tool=each.tool, where=each.first_bad, reason=each.first_bad_reason)
        for each in findings
        if each.first_bad
    ]
    return min(bad, key=lambda each: _order(each.where), default=None)


def _order(where: Where) -> tuple[int, int, int]:
    """Returns a key that sorts places by when they come in the program, as far as they tell."""
    phase = _PHASES.index(where.phase) if where.phase in _PHASES else len(_PHASES)
    return (where.step, phase, where.rank)


def _operator_rows(findings: Iterable[Findings]) -> list[OperatorRow]:
    rows: dict[tuple[str, str, str, str], list[OperatorRow]] = defaultdict(list)
    for each in findings:
        for found in each.operators:
            row = OperatorRow(**dict(found), tool=each.tool, ranks=[each.rank])
            rows[row.tool, row.operator, row.tensor, row.dtype].append(row)
    merged = [_merge(same) for same in rows.values()]
    return sorted(merged, key=worst_first)


def worst_first(row: OperatorFinding) -> tuple[bool, float]:
    """Sorts what failed before what passed, and by how much of the threshold is used up."""
    return (row.passed, -size(row.errors.worst_share_of_threshold))


def _merge(rows: list[OperatorRow]) -> OperatorRow:
    """One row over the ranks; words are those of the rank that is worst."""
    if len(rows) == 1:
        return rows[0]
    worst = min(rows, key=worst_first)
    references = [row.reference_errors for row in rows if row.reference_errors]
    elements = sorted((e for row in rows for e in row.worst), key=lambda e: -size(e.error))
    return worst.model_copy(
        update={
            "ranks": sorted({rank for row in rows for rank in row.ranks}),
            "calls": sum(row.calls for row in rows),
            "failed_calls": sum(row.failed_calls for row in rows),
            "host_calls": sum(row.host_calls for row in rows),
            "passed": all(row.passed for row in rows),
            "errors": merged([row.errors for row in rows]),
            "reference_errors": merged(references) if references else None,
            "first_failed": min(
                (row.first_failed for row in rows if row.first_failed), key=_order, default=None
            ),
            "worst": elements[:_WORST_KEPT],
        }
    )


def _runs(findings: list[Findings]) -> list[OperatorRuns]:
    """Returns how many calls of each operator the chip and the host computed.

    The counts are those of the tool that saw most calls, for tools that are open together see the
    same calls and adding up their counts would count these twice.
    """
    by_tool: dict[str, dict[str, OperatorRuns]] = defaultdict(dict)
    for each in findings:
        seen = by_tool[each.tool]
        counts = [(t.operator, t.calls, t.host_calls) for t in each.times]
        if each.tool == "compare":  # of the tools that list operators, the one that asks who ran
            counts += _calls(each.operators)
        listed = {name for name, _, host in counts if host}
        counts += [(name, n, n) for name, n in each.fallbacks.items() if name not in listed]
        for name, calls, host_calls in counts:
            runs = seen.setdefault(name, OperatorRuns(operator=name, chip_calls=0, host_calls=0))
            runs.chip_calls += calls - host_calls
            runs.host_calls += host_calls
    fullest = max(
        by_tool.values(),
        key=lambda seen: sum(runs.chip_calls + runs.host_calls for runs in seen.values()),
        default={},
    )
    return sorted(fullest.values(), key=lambda runs: (-runs.host_calls, -runs.chip_calls))


def _calls(rows: Iterable[OperatorFinding]) -> list[tuple[str, int, int]]:
    """Lists (operator, calls, calls that the host computed).

    Each tensor of a call has rows of its own, one for each dtype, so the rows of one tensor are
    added up, and of an operator's tensors the one with most calls counts.
    """
    by_tensor: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        calls, host_calls = by_tensor.get((row.operator, row.tensor), (0, 0))
        by_tensor[row.operator, row.tensor] = (calls + row.calls, host_calls + row.host_calls)
    most: dict[str, tuple[int, int]] = {}
    for (operator, _), counted in by_tensor.items():
        most[operator] = max(most.get(operator, counted), counted)
    return [(operator, *counted) for operator, counted in most.items()]


def _times(findings: Iterable[Findings]) -> list[OperatorTime]:
    total: dict[str, OperatorTime] = {}
    for time in (time for each in findings for time in each.times):
        before = total.get(time.operator)
        if before is None:
            total[time.operator] = time
            continue
        calls, total_s = before.calls + time.calls, before.total_s + time.total_s
        total[time.operator] = OperatorTime(
            operator=time.operator,
            calls=calls,
            total_s=total_s,
            mean_s=total_s / calls if calls else 0.0,
            max_s=max(before.max_s, time.max_s),
            host_calls=before.host_calls + time.host_calls,
            host_s=before.host_s + time.host_s,
        )
    return sorted(total.values(), key=lambda time: -time.total_s)


def worst_elements(row: OperatorRow) -> list[Element]:
    return sorted(row.worst, key=lambda element: -size(element.error))


def _first(values: Iterable[str]) -> str:
    return next((value for value in values if value), "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
