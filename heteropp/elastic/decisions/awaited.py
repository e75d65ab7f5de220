"""Nodes that lost all of their chips, but not their disks: a recovery without snapshots waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from heteropp.elastic.decisions.roster import Roster

WAITED_DEADLINES = 4  # so many of the job's deadlines a chip of theirs has to come back


@dataclass(frozen=True)
class Awaited:
    what: str  # is lacking: a sentence
    keepers: frozenset[str]  # nodes that held it: the plan shall use those that are there
    nodes: tuple[str, ...]  # of them, those that had no part in the recovery
    wait_s: float

    @classmethod
    def of(
        cls, what: str, keepers: Collection[str], here: Iterable[str], deadline_s: float
    ) -> Awaited:
        """here: nodes that took part in the recovery; deadline_s: the job's."""
        absent = tuple(sorted(set(keepers).difference(here)))
        return cls(what, frozenset(keepers), absent, WAITED_DEADLINES * deadline_s)

    def came_back(self, roster: Roster) -> bool:
        """Whether one of the nodes has a chip."""
        return not roster.empty_nodes().issuperset(self.nodes)

    @property
    def sentence(self) -> str:
        return f"{self.what}; {', '.join(self.nodes)} may come back within {self.wait_s:g} s"

    @property
    def in_vain(self) -> str:
        return f"{self.what}; {', '.join(self.nodes)} did not come back in {self.wait_s:g} s"
