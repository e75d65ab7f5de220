"""The members' processes as the leader knows them: told to start, seen to end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from heteropp.elastic.job import Board, Generation, generation_store, switch_store
from heteropp.elastic.messages import Ended, Failure
from heteropp.runtime.ranks.watch import silent_rank


@dataclass(frozen=True)
class End:
    """The end of a member's process."""

    member: str
    number: int  # of the generation that it was started for
    code: int
    killed: bool  # as the leader wished
    failure: Failure | None  # what it said itself

    @property
    def lost(self) -> bool:
        """Whether its chip went with it: a chip that fails, and a process killed by others."""
        if self.failure:
            return self.failure.kind == "chip"
        return self.code < 0 and not self.killed

    @property
    def how(self) -> str:
        """How the process ended, to follow the member's name in a sentence."""
        if self.failure:
            return self.failure.what
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


class Members:
    def __init__(self, store: dist.Store) -> None:
        self.store, self.board = store, Board(store)
        self.live: dict[str, int] = {}  # member: generation that it was started for

    def start(self, generation: Generation) -> None:
        """Tells the agents of a new generation, for which they start the members not yet alive."""
        for member in generation.members:
            if member not in self.live:  # removes what its earlier process said too late
                self.board.take(str, "notice", member)
                self.board.take(Failure, "failed", member)
        self.board.say(generation, "generation", generation.number)
        self.board.say(generation.number, "newest")
        for member in generation.members:
            self.live.setdefault(member, generation.number)

    def kill(self, members: Iterable[str]) -> None:
        """Tells the agents to end those of the members that are alive."""
        for member in members:
            if member in self.live:
                self.board.say("", "end", self.live[member], member)

    def ended(self) -> list[End]:
        """Members that ended since this was last asked, those first who took their chips along."""
        ends: list[End] = []
        for member, number in list(self.live.items()):
            if (ended := self.board.heard(Ended, "ended", number, member)) is None:
                continue
            del self.live[member]
            failure = self.board.take(Failure, "failed", member)
            ends.append(End(member, number, ended.code, ended.killed, failure))
        return sorted(ends, key=lambda end: not end.lost)

    def silent(self, generation: Generation) -> str | None:
        """The member that the others of a generation waited for in vain, if there is one."""
        number, members = generation.number, (*generation.members, *generation.leavers)
        for store in (switch_store(self.store, number), generation_store(self.store, number)):
            if (rank := silent_rank(store)) is not None:
                return members[rank]
        return None
