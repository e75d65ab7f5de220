"""What became of the job so far: its progress, its changes, and what causes the next one."""

from __future__ import annotations

import time
from collections.abc import Callable

from heteropp.description.files import write_json
from heteropp.description.plan import Plan
from heteropp.elastic.job import Generation
from heteropp.elastic.launcher.change import Change, changed
from heteropp.elastic.launcher.plan_search import Planned
from heteropp.elastic.messages import Account, Progress

UNEXPLAINED = "members ended without a word"


class History:
    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` takes sentences for the user."""
        self.tell = tell
        self.changes: list[Change] = []
        self.progress: Progress | None = None
        self.progress_at_s = time.monotonic()  # when it was heard
        self.lost_at_s: float | None = None  # monotonic: since when no step runs
        self.causes: list[str] = []  # of the next change, and of what follows it
        self.known_causes = 0  # of them, when the next generation was planned

    def note(self, what: str) -> None:
        """Notes a cause of the next change, and tells the user."""
        self.causes.append(what)
        self.tell(what)

    def plan_next(self) -> str:
        """Returns the causes of the generation that is planned now; "" where nothing happened."""
        self.known_causes = len(self.causes)
        return "; ".join(self.causes)

    def last_cause(self) -> str:
        return self.causes[-1] if self.causes else UNEXPLAINED

    def hear(self, news: Progress | None) -> bool:
        """Takes the newest progress, and returns whether a step was added to it."""
        if news is None or news == self.progress:
            return False
        self.progress, self.progress_at_s = news, time.monotonic()
        return True

    def stand_still(self) -> None:
        """Notes that no step runs, counted from the last progress: a rank may be silent since."""
        if self.lost_at_s is None:
            self.lost_at_s = self.progress_at_s

    def go_on(
        self, generation: Generation, found: Planned, plan_before: Plan, account: Account
    ) -> None:
        """Keeps the change to a generation that has its state. Raises FileError."""
        before = self.changes[-1] if self.changes else None
        stood_s = time.monotonic() - self.lost_at_s if self.lost_at_s else account.seconds
        change = changed(generation, found, before, plan_before, account, self.progress, stood_s)
        self.changes.append(change)
        write_json(generation.folder / "change.json", change)
        self.causes = self.causes[self.known_causes :]
        self.lost_at_s = None

    def is_kept(self, keep_every: int) -> bool:
        """Whether every member has certainly kept a step, as each does every so many steps.

        Before that the few steps are trained again, from the start.
        """
        if not (self.progress and self.changes):
            return False
        return self.progress.step - self.changes[0].step > 2 * keep_every
