"""What heartbeats tell of others: each one's is a number that grows while it is alive."""

from __future__ import annotations

import time
from collections.abc import Sequence

POLL_S = 1.0  # from one heartbeat to the next
SILENCE_S = 10.0  # after which whoever is not heard is named


class MonitoredPeer:
    """Whom a rank, or the leader of an elastic job, listens to all the time."""

    def __init__(self) -> None:
        self.beat, self.heard_s = -1, time.monotonic()
        self.silent_s = 0.0
        self.missed = False

    def listen(self, beat: int, asked_s: float, heard_s: float | None = None) -> str | None:
        """Takes what was heard; gives what there is to say about it.

        asked_s, heard_s: before and after the question for it; None: it was heard at once. Silence
        counts from the end of one to the beginning of another, so that it was no shorter.
        """
        # while this process was paused itself, nobody was silent
        self.silent_s += min(asked_s - self.heard_s, 5 * POLL_S)
        self.heard_s = asked_s
        if beat > self.beat:  # an earlier one that somebody repeats is no sign of life
            news = f"answers again, after {self.silent_s:.0f} s" if self.missed else None
            self.beat, self.silent_s, self.missed = beat, 0.0, False
            self.heard_s = asked_s if heard_s is None else heard_s
            return news
        if self.silent_s > SILENCE_S and not self.missed:
            self.missed = True
            return f"has not answered for {SILENCE_S:.0f} s"
        return None


class RollCall:
    """Asks, once something has failed, who of all ranks is still alive."""

    def __init__(self, beats: Sequence[int], deadline_s: float) -> None:
        self.beats = beats
        self.until_s = time.monotonic() + min(SILENCE_S, deadline_s)

    def is_over(self) -> bool:
        return time.monotonic() > self.until_s

    def missing(self, beats: Sequence[int]) -> list[int]:
        """Returns the ranks that have not beaten twice since it began.

        One beat is not enough: it may have been on its way before the rank died.
        """
        return [rank for rank, beat in enumerate(beats) if beat < self.beats[rank] + 2]
