"""What a command shows while it works: a bar on a terminal, and lines where there is none.

Through a pipe or in a job's log, a line comes after every SILENCE_S of silence, so that a person
can tell a long command from one that hangs. Commands share this; it stands on rich.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rich import progress
from rich.console import Console

SILENCE_S = 10.0  # between two lines, at most
THREAD = "progress"  # the name of those that print lines


def shows_progress(thread: threading.Thread) -> bool:
    """Whether a thread does nothing but show progress: one of Lines, or of rich."""
    return thread.name == THREAD or type(thread).__module__ == "rich.live"


class Lines:
    """Prints a line after every SILENCE_S in which nothing was printed, unless on a terminal."""

    def __init__(self, say: Callable[[], str], console: Console | None = None) -> None:
        """say: gives the line, from a thread of its own. console: standard error if absent."""
        self._say, self._console = say, console or Console(stderr=True)
        self._spoke_s = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to wait for silence."""
        if not self._console.is_terminal and self._thread is None:
            self._spoke_s = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name=THREAD, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Prints no more; a line that is being printed is finished first."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def spoke(self) -> None:
        """Says that something else was printed."""
        self._spoke_s = time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(max(0.0, self._spoke_s + SILENCE_S - time.monotonic())):
            if time.monotonic() - self._spoke_s >= SILENCE_S:
                self.spoke()
                self._console.print(self._say(), soft_wrap=True, markup=False, highlight=False)


class Progress(progress.Progress):
    """rich's, which prints its newest task's state as lines where there is no terminal."""

    def __init__(
        self, *columns: Any, console: Console | None = None, transient: bool = False
    ) -> None:
        """Takes rich's options; standard error if no console is given."""
        console = console or Console(stderr=True)
        super().__init__(
            *columns, console=console, transient=transient, disable=not console.is_terminal
        )
        self._lines = Lines(self._state, console)

    def start(self) -> None:
        """Shows the bar, or begins to print lines."""
        super().start()
        self._lines.start()

    def stop(self) -> None:
        """Ends what start() began."""
        self._lines.stop()
        super().stop()

    def _state(self) -> str:
        task = next((task for task in reversed(self.tasks) if not task.finished), None)
        if task is None:
            return "finishing"
        what = task.description or "working"
        if not task.total:
            return f"{what}: {task.elapsed or 0:.0f} s"
        return f"{what}: {task.completed / task.total:.0%} in {task.elapsed or 0:.0f} s"


class Status:
    """A text beside rich's spinner, or in lines; to be used in a `with`."""

    def __init__(self, text: str, console: Console | None = None) -> None:
        """text: what is done; update() changes it."""
        console = console or Console(stderr=True)
        self._text, self._began_s = text, time.monotonic()
        self._status = console.status(text) if console.is_terminal else None
        self._lines = Lines(self._state, console)

    def update(self, text: str) -> None:
        """Says what is done now."""
        self._text = text
        if self._status:
            self._status.update(text)

    def __enter__(self) -> Status:
        """Begins to show it."""
        if self._status:
            self._status.start()
        self._lines.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Shows it no more."""
        self._lines.stop()
        if self._status:
            self._status.stop()

    def _state(self) -> str:
        return f"{self._text or 'working'}: {time.monotonic() - self._began_s:.0f} s"
