"""What a switch needs is made beside the running steps, as soon as there is word of one."""

from __future__ import annotations

import threading
from contextlib import suppress

from heteropp.description.plan import read_plan
from heteropp.elastic.job import Board, Generation, Job
from heteropp.elastic.member.links import ClusterLinks
from heteropp.runtime.train import SAVE_S
from heteropp.state.switching.switch import Switch
from heteropp.state.switching.table import Table

POLL_S = 0.5


def switch_between(old: Generation, new: Generation) -> Switch:
    return Switch(read_plan(old.plan), read_plan(new.plan), old.members, new.members)


def table_of(switch: Switch, links: ClusterLinks | None) -> Table:
    return switch.table(links.bytes_per_s if links else None)


class Preparation:
    """A thread that makes the tables of the switches that may follow one generation."""

    def __init__(self, job: Job, generation: Generation, links: ClusterLinks | None) -> None:
        self.job, self.generation, self.links = job, generation, links
        self.board = Board(job.meeting.connect(SAVE_S))  # the thread's own
        self.tables: dict[int, Table] = {}  # by number of the generation that is to follow
        self.finished = threading.Event()
        threading.Thread(target=self._run, name="preparation", daemon=True).start()

    def finish(self) -> dict[int, Table]:
        self.finished.set()
        return self.tables

    def _run(self) -> None:
        seen = self.generation.number
        while not self.finished.wait(POLL_S):
            with suppress(Exception):  # what cannot be prepared is made, or fails, at the switch
                newest = self.board.heard(int, "newest") or seen
                if newest > seen:
                    seen = newest
                    self._prepare(self.board.hear(Generation, "generation", newest))

    def _prepare(self, new: Generation) -> None:
        if new.start == "switch" and new.before == self.generation.number:
            switch = switch_between(self.generation, new)
            self.tables[new.number] = table_of(switch, self.links)
