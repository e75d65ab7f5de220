"""The members' processes as the leader reaches them: told to start and to end, seen to end."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

import torch.distributed as dist

from heteropp.elastic.decisions.commands import KillMembers, PlannedGeneration
from heteropp.elastic.decisions.events import MemberEnded, NoticeGiven
from heteropp.elastic.job import Board, Generation, generation_store, switch_store
from heteropp.elastic.messages import Ended, Failure
from heteropp.runtime.ranks.watch import silent_rank


class Members:
    def __init__(self, store: dist.Store) -> None:
        self.store, self.board = store, Board(store)

    def start(self, generation: Generation) -> None:
        """Tells the agents of a new generation, for which they start its joiners."""
        self.board.say(generation, "generation", generation.number)
        self.board.say(generation.number, "newest")

    def kill(self, command: KillMembers) -> None:
        """Tells the agents to end members."""
        for member, number in command.members:
            self.board.say("", "end", number, member)

    def noticed(self, live: Mapping[str, int]) -> list[NoticeGiven]:
        """Returns what members were told by a signal since this was last asked.

        live: those to be asked about, each with the generation that it was started for.
        """
        now_s = time.monotonic()
        told = (m for m, n in live.items() if self.board.take(str, "notice", n, m) is not None)
        return [NoticeGiven(at_s=now_s, member=member) for member in told]

    def ended(
        self, live: Mapping[str, int], generations: Collection[PlannedGeneration]
    ) -> list[MemberEnded]:
        """Members that ended by now, those first who took their chips along.

        live: those to be asked about, each with the generation that it was started for;
        generations: in which the others may have waited for one of them in vain.
        """
        found: list[tuple[str, Ended, Failure | None]] = []
        for member, number in live.items():
            if ended := self.board.heard(Ended, "ended", number, member):
                found.append((member, ended, self.board.take(Failure, "failed", number, member)))
        silent = self.silent(generations) if found else ()
        now_s = time.monotonic()
        ends = [
            MemberEnded(
                at_s=now_s,
                member=member,
                number=live[member],
                code=ended.code,
                killed=ended.killed,
                failure=failure,
                silent=member in silent,
            )
            for member, ended, failure in found
        ]
        return sorted(ends, key=lambda end: not end.lost)

    def silent(self, generations: Iterable[PlannedGeneration]) -> tuple[str, ...]:
        """The members that the others of these generations waited for in vain."""
        return tuple(m for each in generations if (m := self._silent_in(each)) is not None)

    def _silent_in(self, generation: PlannedGeneration) -> str | None:
        number, members = generation.number, (*generation.members, *generation.leavers)
        for store in (switch_store(self.store, number), generation_store(self.store, number)):
            if (rank := silent_rank(store)) is not None:
                return members[rank]
        return None
