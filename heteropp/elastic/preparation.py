"""Makes the table of a switch beside the running steps, as soon as there is word of one."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch.distributed as dist

from heteropp.elastic.job import Board, Generation
from heteropp.elastic.links import Links
from heteropp.plan import read_plan
from heteropp.switching.change import Change
from heteropp.switching.table import Table

POLL_S = 0.5


def change_between(old: Generation, new: Generation) -> Change:
    return Change(read_plan(old.plan), read_plan(new.plan), old.members, new.members)


def table_of(change: Change, links: Links | None) -> Table:
    return change.table(links.bytes_per_s if links else None)


class Preparation:
    """Of what may follow on one generation."""

    def __init__(self, store: dist.Store, generation: Generation, links: Links | None) -> None:
        """`store`: a connection for the thread alone."""
        self.board, self.generation, self.links = Board(store), generation, links
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
            change = change_between(self.generation, new)
            self.tables[new.number] = table_of(change, self.links)
