"""What the measuring tools print: a figure of a machine that was busy is neither met nor missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dicomm.bench.quiet import Quiet

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import evidence

QUIET, LOUD = Quiet(1.0, 1.0, 1.0), Quiet(30.0, 1.0, 1.0)
ROWS = [
    evidence.row("a step", "s", 1.0, bar=2.0),
    evidence.row("a longer step", "s", 3.0, bar=2.0),
    evidence.row("losses that differ", "steps", 0, bar=0),
]


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [evidence.row("plan of prod[eu]", "s", 1.0, peer=2.0, peer_name="torch[/x]")]
    evidence.show("bench", rows, [], False)
    said = capsys.readouterr().out
    assert "plan of prod[eu]" in said and "torch[/x]" in said


@pytest.mark.parametrize(
    ("quiet", "verdicts"),
    [(QUIET, ["met", "missed", "met"]), (LOUD, ["not judged", "not judged", "met"])],
)
def test_a_busy_machine_meets_nothing_that_is_timed(
    quiet: Quiet, verdicts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    evidence.show("bench", ROWS, ["a note"], False, quiet)
    said = capsys.readouterr().out
    for each, verdict in zip(ROWS, verdicts, strict=True):
        line = next(line for line in said.splitlines() if each["name"] in line)
        assert [word for word in ("met", "missed", "not judged") if word in line] == [verdict]
    evidence.show("bench", ROWS, [], True, quiet)
    printed = json.loads(capsys.readouterr().out)
    not_judged = [bool(row.get("not_judged")) for row in printed["rows"]]
    assert not_judged == [verdict == "not judged" for verdict in verdicts]
    assert quiet.sentence in printed["notes"]
