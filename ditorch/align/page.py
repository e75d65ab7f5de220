"""The report as one HTML page that needs nothing else: no network, no other file.

Names of modules and source lines come from users' programs, so everything is escaped, and the
page's own policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ditorch.align import pictures
from ditorch.align.report import (
    ChipReport,
    ConformanceProblem,
    FirstBad,
    OperatorRow,
    Report,
    worst_elements,
    worst_first,
)
from ditorch.precision.errors import merged
from ditorch.precision.loss import BAR
from ditorch.precision.results import Where, write_atomically
from hyperhetero.output import target_of

_HERE = Path(__file__).parent
_CARDS = 30  # failed operators that get a card; all of them are in the table
_COARSE = 15  # first bin of Errors.histogram with relative errors of 1e-3 and more


def write_report(report: Report, page: Path) -> str:
    """Writes the page, and report.json under the page's name beside it; says where.

    Raises OSError; ValueError if the page's name is the data's.
    """
    data = page.with_suffix(".json")
    if page == data:
        raise ValueError(f"{page}: the page's data is written there, expected a name in .html")
    target_of(page)  # it has to be a file, for there is one beside it
    write_atomically(page, render_page(report).encode())
    write_atomically(data, report.model_dump_json(indent=1).encode())
    return f"{page} and {data}"


def render_page(report: Report) -> str:
    """The whole page."""
    style, script = ((_HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rows = [_Row.of(chip, found) for chip in report.chips for found in chip.operators]
    rows.sort(key=lambda row: worst_first(row.found))
    failed = [row for row in rows if not row.found.passed]
    lines = _loss_lines(report)
    sections = {
        "first": _first_bads(report),
        "losses": lines,
        "operators": rows,
        "distributions": rows,
        "overflows": [(c.chip, overflow) for c in report.chips for overflow in c.overflows],
        "fallbacks": [(c.chip, runs) for c in report.chips for runs in c.runs],
        "times": _times(report),
        "conformance": [(c.chip, c.conformance) for c in report.chips if c.conformance],
    }
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        report=report,
        sections=[(name, _TITLES[name]) for name, content in sections.items() if content],
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        rows=rows,
        failed=failed[:_CARDS],
        failed_left_out=max(0, len(failed) - _CARDS),
        details=[row.detail() for row in rows],
        first_bads=sections["first"],
        losses=lines,
        losses_picture=_losses_picture(lines) if lines else "",
        loss_bar=BAR,
        distributions=_distributions(report),
        overflows=sections["overflows"],
        runs=sections["fallbacks"],
        times=sections["times"],
        conformances=sections["conformance"],
        problems=_problems(report),
        histogram=pictures.histogram,
        worst_elements=worst_elements,
        number=number,
        precisely=precisely,
        percent=percent,
        grouped="{:,}".format,
        host_share=host_share,
    )


_TITLES = {
    "first": "First bad operator",
    "losses": "Losses",
    "operators": "Operators",
    "distributions": "Error distributions",
    "overflows": "Overflows",
    "fallbacks": "Fallbacks",
    "times": "Device time",
    "conformance": "Conformance",
}


@dataclass(frozen=True)
class _Row:
    """A row of the operator table."""

    chip: str
    found: OperatorRow
    spark: Markup
    coarse: float  # share of elements with a relative error of 1e-3 and more
    ratio: float | None  # to the reference's own error
    meter: float
    module: str

    @classmethod
    def of(cls, chip: ChipReport, found: OperatorRow) -> _Row:
        errors, own = found.errors, found.reference_errors
        where = found.first_failed or found.worst_where
        share = errors.worst_share_of_threshold
        return cls(
            chip=chip.chip,
            found=found,
            spark=pictures.spark(errors.histogram),
            coarse=sum(errors.histogram[_COARSE:]) / max(1, sum(errors.histogram)),
            ratio=None if own is None else _ratio(errors.rmse, own.rmse),
            meter=1.0 if math.isnan(share) else min(1.0, share),
            module=where.module if where else "",
        )

    def detail(self) -> dict[str, Any]:
        """What the page shows under the row when asked."""
        found, errors = self.found, self.found.errors
        facts = [
            ("reason", found.reason),
            ("standard", found.threshold),
            ("first failed", _place(found.first_failed)),
            ("worst at", _place(found.worst_where)),
            ("elements", f"{errors.elements:,}, {errors.beyond_threshold:,} beyond the threshold"),
            ("largest absolute error", number(errors.max_abs)),
            ("mean relative error", number(errors.mean_rel)),
        ]
        if own := found.reference_errors:
            facts.append(
                ("the reference's own", f"max rel {number(own.max_rel)}, RMSE {number(own.rmse)}")
            )
        facts.append(("ranks", ", ".join(str(rank) for rank in found.ranks)))
        return {
            "facts": [fact for fact in facts if fact[1]],
            "worst": [
                [str(e.index), precisely(e.actual), precisely(e.expected), number(e.error)]
                for e in worst_elements(found)
            ],
        }


def _place(where: Where | None) -> str:
    if where is None:
        return ""
    return (
        f"{where.module or 'outside the model'}, {where.source or 'no source line'}, "
        f"{where.phase} of step {where.step}, rank {where.rank}, call {where.index}"
    )


def _ratio(error: float, own: float) -> float:
    if own == 0:
        return 1.0 if error == 0 else math.inf
    return error / own


def _first_bads(report: Report) -> list[tuple[ChipReport, FirstBad]]:
    return [(chip, chip.first_bad) for chip in report.chips if chip.first_bad]


# --- losses -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LossLine:
    name: str
    losses: list[float]
    is_reference: bool
    relative_errors: list[float] | None  # by step; None without a reference
    error: float | None  # their mean; None where the curves are not of equal length
    colour: str


def _loss_lines(report: Report) -> list[_LossLine]:
    """Each curve once; of a chip's curves the first is the reference's."""
    lines: dict[str, _LossLine] = {}
    for chip in report.chips:
        for i, curve in enumerate(chip.losses):
            is_reference = i == 0 and len(chip.losses) > 1
            name = curve.name
            if is_reference and name in lines:
                continue
            reference = chip.losses[0].losses
            errors = _relative_errors(curve.losses, reference) if i else None
            is_comparable = bool(errors) and len(curve.losses) == len(reference)
            lines[name if is_reference else f"{chip.chip}: {name}"] = _LossLine(
                name=name if is_reference or name == chip.chip else f"{chip.chip}: {name}",
                losses=curve.losses,
                is_reference=is_reference,
                relative_errors=errors,
                error=fmean(errors) if errors and is_comparable else None,
                colour=pictures.colour(len(lines)),
            )
    return list(lines.values())


def _losses_picture(lines: list[_LossLine]) -> Markup:
    errors = [line.relative_errors for line in lines]
    return pictures.loss_picture([line.losses for line in lines], errors, BAR)


def _relative_errors(losses: list[float], reference: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) if b else math.nan for a, b in zip(losses, reference, strict=False)]


# --- tables -----------------------------------------------------------------------------------


def _distributions(report: Report) -> list[tuple[str, list[int]]]:
    return [
        (chip.chip, merged([row.errors for row in chip.operators]).histogram)
        for chip in report.chips
        if chip.operators
    ]


def _times(report: Report) -> list[tuple[str, Any, float]]:
    """Lists (chip, an operator's time, its fraction of the chip's total time)."""
    totals = {chip.chip: sum(time.total_s for time in chip.times) for chip in report.chips}
    return [
        (chip.chip, time, time.total_s / (totals[chip.chip] or 1.0))
        for chip in report.chips
        for time in chip.times
    ]


def _problems(report: Report) -> list[dict[str, Any]]:
    """Samples that did not pass for one reason, in one line."""
    alike: dict[tuple[str, str, str, str], list[ConformanceProblem]] = defaultdict(list)
    for chip in report.chips:
        for problem in chip.conformance.problems if chip.conformance else []:
            alike[chip.chip, problem.status, problem.operator, problem.reason].append(problem)
    return [
        {
            "chip": chip,
            "status": status,
            "operator": operator,
            "reason": reason,
            "dtypes": ", ".join(sorted({each.dtype for each in same})),
            "variants": ", ".join(sorted({each.variant for each in same})),
            "samples": len(same),
        }
        for (chip, status, operator, reason), same in alike.items()
    ]


def host_share(chip: ChipReport) -> float:
    """The fraction of the chip's operator calls that the host computed; 0 if it had none."""
    host = sum(runs.host_calls for runs in chip.runs)
    return host / max(1, host + sum(runs.chip_calls for runs in chip.runs))


# --- figures ----------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, for errors and counts."""
    if isinstance(value, int):
        return f"{value:,}"
    if special := _special(value):
        return special
    return f"{value:,.0f}" if value == 0 or 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def precisely(value: float) -> str:
    """Nine digits tell any two float32 apart."""
    return _special(value) or f"{value:.9g}"


def percent(value: float) -> str:
    return _special(value) or f"{100 * value:.3g}%"


def _special(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("∞" if value > 0 else "-∞") if math.isinf(value) else ""
