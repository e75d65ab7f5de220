"""tools/accuracy and tools/planner-bench refuse what they cannot read before they measure."""

from __future__ import annotations

from pathlib import Path

import accuracy
import planner_bench
import pytest
from commands import run_command


@pytest.mark.parametrize(
    ("app", "arguments", "expected"),
    [
        (accuracy.app, ["--model", "nowhere"], "model 'nowhere': expected the path of a model"),
        (accuracy.app, ["--output", "/dev/null"], "/dev/null cannot be written: "),
        (planner_bench.app, ["--metis-data", "nowhere"], "folder nowhere/profile_data_samples"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_sentence(app, arguments, expected) -> None:
    ended = run_command(app, arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(expected) and ended.stderr.count("\n") == 1


def test_accuracy_says_that_it_has_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan is there to compare, just as where none was paced well enough."""
    monkeypatch.setattr(accuracy, "_plans", lambda *_: [])
    options = ["--clusters", "1", "--no-families", "--output", tmp_path / "found.json"]
    ended = run_command(accuracy.app, options)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("plans: 0.00 plans (bar 20)")
