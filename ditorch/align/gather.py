"""Finds and reads every result file under a directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ditorch.align.report import ConformanceProblem, ConformanceSummary, Report, make_report
from ditorch.precision.results import read_findings


def gather(*directories: Path) -> Report:
    """The report on all findings (`*-rank*.json`) and conformance results under `directories`.

    Raises:
        ValueError: no results are there, or a file is damaged; one sentence naming it.
    """
    for each in directories:
        if not each.is_dir():
            raise ValueError(f"{each}: not a directory; expected one with results of the tools")
    findings = [read_findings(path) for path in _files(directories, "*-rank*.json")]
    conformances = [_conformance(path) for path in _files(directories, "conform*.json")]
    if not findings and not conformances:
        raise ValueError(
            f"{', '.join(map(str, directories))}: no results here; expected files like "
            "compare-rank0.json, which the tools write to their output directory"
        )
    return make_report(findings, conformances)


def _files(directories: Iterable[Path], pattern: str) -> Iterator[Path]:
    for path in sorted(path for each in directories for path in each.rglob(pattern)):
        is_unfinished = path.name.startswith(".")
        is_of_a_trial = (path.parent / "done.json").exists()  # of isolate, which sums them up
        if path.is_file() and not is_unfinished and not is_of_a_trial:
            yield path


def _conformance(path: Path) -> tuple[str, ConformanceSummary]:
    from ditorch.conform.results import read_conformance

    found = read_conformance(path)
    problems = [
        ConformanceProblem(
            operator=operator,
            dtype=outcome.dtype,
            variant=outcome.variant,
            status=status,
            reason=outcome.reason,
        )
        for status in ("failed", "unsupported")
        for operator, outcome in found.problems(status)  # type: ignore[arg-type]
    ] + [
        ConformanceProblem(
            operator=f"{check.group}: {check.name}", status=check.status, reason=check.reason
        )
        for check in found.checks
        if check.status != "passed"
    ]
    return f"{found.vendor}, {found.chip_type}", ConformanceSummary(
        operators=len(found.covered),
        samples_passed=found.tally.passed,
        samples_failed=found.tally.failed,
        samples_unsupported=found.tally.unsupported,
        checks_passed=found.check_tally.passed,
        checks_failed=found.check_tally.failed,
        checks_unsupported=found.check_tally.unsupported,
        computed_by=dict(sum((Counter(each.computed_by) for each in found.operators), Counter())),
        problems=problems,
    )
