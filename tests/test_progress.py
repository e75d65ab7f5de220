"""A command that takes long says through a pipe that it still works."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from hyperhetero import progress
from hyperhetero.progress import Lines, Progress, Status


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(progress, "SILENCE_S", 0.05)
    return Console(file=io.StringIO(), width=40)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def wait_for(found: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_bar_becomes_lines_with_the_share_that_is_done(pipe: Console) -> None:
    with Progress(console=pipe) as bar:
        task = bar.add_task("reading", total=4)
        bar.advance(task)
        wait_for(lambda: said(pipe).count("reading: 25% in ") > 1)
        bar.advance(task, 3)
        wait_for(lambda: "finishing" in said(pipe))
    before = said(pipe)
    assert "━" not in before
    time.sleep(0.2)
    assert said(pipe) == before


def test_a_status_becomes_lines_with_what_is_done_now(pipe: Console) -> None:
    with Status("searching", pipe) as status:
        wait_for(lambda: "searching: 0 s\n" in said(pipe))
        status.update("with [b]two[/b] nodes lost")
        wait_for(lambda: "with [b]two[/b] nodes lost: " in said(pipe))


def test_a_terminal_gets_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.02)
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    with Status("searching", console), Progress(console=console) as bar:
        bar.add_task("reading", total=4)
        time.sleep(0.2)
    assert "searching: " not in said(console) and "reading: 0%" not in said(console)


def test_nothing_is_said_after_something_else_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 3600.0)
    console = Console(file=io.StringIO())
    lines = Lines(lambda: "still here", console)
    lines.start()
    lines.spoke()
    lines.stop()
    assert said(console) == ""
