"""What the report makes of findings: counts, merged ranks, and what its page says of losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ditorch.align.gather import gather
from ditorch.align.page import render_page, write_report
from ditorch.align.report import ChipReport, OperatorRuns, make_report
from ditorch.align.run import Alignment
from ditorch.align.tables import alignment_evidence
from ditorch.precision.errors import histogram
from ditorch.precision.results import (
    Errors,
    Findings,
    LossCurve,
    OperatorFinding,
    OperatorTime,
    write_findings,
)


def report_of(*findings: Findings) -> ChipReport:
    (chip,) = make_report(findings).chips
    return chip


def row(operator: str, tensor: str = "out", **fields: object) -> OperatorFinding:
    return OperatorFinding(operator=operator, tensor=tensor, **{"threshold": "equal"} | fields)


def test_every_call_is_counted_once_whatever_its_results_are_called() -> None:
    rows = [
        row("aten.add_.Tensor", "self", dtype="float32", calls=3, host_calls=2),
        row("aten.add_.Tensor", "self", dtype="bfloat16", calls=4, host_calls=0),
        row("aten.max.dim", "out.0", dtype="float32", calls=5, host_calls=5),
        row("aten.max.dim", "out.1", dtype="int64", calls=5, host_calls=5),
    ]
    cast = Findings(tool="cast", chip="x", operators=[row("aten.mm.default", calls=99)])
    found = report_of(Findings(tool="compare", chip="x", operators=rows), cast)
    assert found.runs == [
        OperatorRuns(operator="aten.max.dim", chip_calls=0, host_calls=5),
        OperatorRuns(operator="aten.add_.Tensor", chip_calls=5, host_calls=2),
    ]


def test_times_of_ranks_are_summed() -> None:
    def rank(number: int) -> Findings:
        time = OperatorTime(
            operator="aten.mm.default", calls=2, total_s=3.0, mean_s=1.5, max_s=1.0 + number,
            host_calls=1, host_s=0.5,
        )  # fmt: skip
        return Findings(tool="time", chip="x", rank=number, times=[time])

    (time,) = report_of(rank(0), rank(1)).times
    assert time == OperatorTime(
        operator="aten.mm.default", calls=4, total_s=6.0, mean_s=1.5, max_s=2.0, host_calls=2,
        host_s=1.0,
    )  # fmt: skip


def test_what_was_not_judged_is_not_said_to_be_within_its_threshold() -> None:
    rows = [row("aten.mm.default"), row("aten.secret.default", threshold="not compared")]
    cast = Findings(tool="cast", chip="x", operators=[row("aten.mm.default", threshold="")])
    found = report_of(Findings(tool="compare", chip="x", operators=rows), cast)
    assert found.verdict == "1 operator result within their thresholds"


def test_each_loss_curve_has_its_own_error() -> None:
    """The page judges each of isolate's loss curves by its own error against the reference.

    Curve "b" is off; "b, healed", which has the faulty operator on the host, agrees; a curve of
    another length is not judged.
    """
    curves = {"reference": [2.0, 1.0], "b": [2.2, 1.1], "b, healed": [2.0, 1.0], "short": [2.0]}
    losses = [LossCurve(name=name, losses=values) for name, values in curves.items()]
    found = Findings(tool="isolate", chip="b", losses=losses, mean_relative_error=0.1, passed=False)
    page = render_page(make_report([found]))
    table = page[page.index('<section id="losses">') :].partition("</table>")[0]
    cells = [re.sub(r"<.*?>", " ", line).split() for line in table.split("<tr>")[2:]]
    assert [line[-1] for line in cells] == ["reference", "failed", "passed", "none"]
    assert "10%" in cells[1] and "0%" in cells[2]


@pytest.mark.parametrize(("relative", "is_coarse"), [(0.9e-3, False), (1.1e-3, True)])
def test_the_share_of_coarse_elements_begins_at_a_thousandth(
    relative: float, is_coarse: bool
) -> None:
    counts = histogram(torch.tensor([relative], dtype=torch.float64))
    found = row("aten.mm.default", errors=Errors(elements=1, histogram=counts))
    page = render_page(make_report([Findings(tool="compare", chip="x", operators=[found])]))
    share = re.search(r'<td data-value="([\d.]+)"><svg class="spark"', page)
    assert share is not None and float(share[1]) == is_coarse


def test_a_page_is_not_overwritten_by_its_data(tmp_path: Path) -> None:
    write_findings(Findings(tool="overflow", chip="x"), tmp_path)
    with pytest.raises(ValueError, match=r"page\.json: .* expected a name in \.html"):
        write_report(gather(tmp_path), tmp_path / "page.json")
    assert not (tmp_path / "page.json").exists()


def test_losses_that_are_not_numbers_are_still_json() -> None:
    (found,) = alignment_evidence([Alignment("b", float("nan"), False, "")])["rows"]
    assert (found["ours"], found["ratio"], found["bar"]) == (None, None, 1.5)
