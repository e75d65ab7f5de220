"""What became of the job so far, as far as it bears on what follows: progress, and causes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heteropp.elastic.messages import Account, Progress

UNEXPLAINED = "members ended without a word"


@dataclass(frozen=True, kw_only=True)
class History:
    """A history is never changed: what happens gives another one."""

    progress: Progress | None = None
    progress_at_s: float  # monotonic: when it was heard, or else when the job began
    lost_at_s: float | None = None  # monotonic: since when no step runs
    causes: tuple[str, ...] = ()  # of the next change, and of what follows it
    known_causes: int = 0  # of them, when the next generation was planned
    first_step: int | None = None  # completed when the first generation began to train

    def because(self, *causes: str) -> History:
        """Adds causes of the next change."""
        return replace(self, causes=(*self.causes, *causes))

    def plan_next(self) -> History:
        """The causes so far are those of the generation that is planned now; others follow it."""
        return replace(self, known_causes=len(self.causes))

    def last_cause(self) -> str:
        return self.causes[-1] if self.causes else UNEXPLAINED

    def hear(self, news: Progress, now_s: float) -> History:
        """Takes the newest progress; it is the same history where no step was added."""
        if news == self.progress:
            return self
        return replace(self, progress=news, progress_at_s=now_s)

    def stand_still(self) -> History:
        """Notes that no step runs, counted from the last progress: a rank may be silent since."""
        if self.lost_at_s is not None:
            return self
        return replace(self, lost_at_s=self.progress_at_s)

    def downtime_s(self, account: Account, now_s: float) -> float:
        """Returns the seconds without a step, at the end of which a generation has its state."""
        return now_s - self.lost_at_s if self.lost_at_s is not None else account.seconds

    def go_on(self, account: Account) -> History:
        """Notes that a generation trains; what happened since it was planned causes the next."""
        return replace(
            self,
            causes=self.causes[self.known_causes :],
            lost_at_s=None,
            first_step=account.step if self.first_step is None else self.first_step,
        )

    def is_kept(self, keep_every: int) -> bool:
        """Whether every member has certainly kept a step, as each does every so many steps.

        Before that the few steps are trained again, from the start.
        """
        if self.progress is None or self.first_step is None:
            return False
        return self.progress.step - self.first_step > 2 * keep_every
