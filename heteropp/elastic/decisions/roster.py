"""Which chips there are: the members that a plan may count on, and what became of the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from heteropp.elastic.messages import node_of

# "up": there; "noticed": there, but will go; "lost": went without notice; "away": went with one, or
# was never there
Standing = Literal["up", "noticed", "lost", "away"]


@dataclass(frozen=True, kw_only=True)
class Roster:
    """A roster is never changed: what happens to a chip gives another one."""

    nodes: tuple[str, ...]  # others have nobody to start a member
    standing: Mapping[str, Standing]  # of all members there may ever be
    # monotonic, of those that are noticed
    goes_at_s: Mapping[str, float] = field(default_factory=dict)
    # by node, as availability was last told
    offered: Mapping[str, int] = field(default_factory=dict)
    withdrawn: frozenset[str] = frozenset()  # noticed members that availability left out

    @classmethod
    def of(
        cls,
        members: Collection[str],
        chips: Mapping[str, int] | None = None,
        nodes: Collection[str] | None = None,
    ) -> Roster:
        """`members`: all there may ever be. None: all of their chips, or nodes, are there.

        chips: those there to begin with, by node; nodes: others have nobody to start a member.
        """
        names = dict.fromkeys(map(node_of, members))
        here = tuple(name for name in names if nodes is None or name in nodes)
        away: dict[str, Standing] = dict.fromkeys(members, "away")
        if chips is not None:
            found, _, _ = cls(nodes=here, standing=away).offer(chips, 0)
            return found
        up: dict[str, Standing] = {m: "up" for m in members if node_of(m) in here}
        return cls(nodes=here, standing={**away, **up})

    def up(self) -> frozenset[str]:
        return frozenset(member for member, what in self.standing.items() if what == "up")

    def there(self) -> frozenset[str]:
        """Returns the members whose chips are there: up, or noticed and still to go."""
        there = ("up", "noticed")
        return frozenset(member for member, what in self.standing.items() if what in there)

    def notice(self, member: str, goes_at_s: float) -> Roster:
        """The member's chip will go; that is no news of one that is not up."""
        if self.standing[member] != "up":
            return self
        return replace(
            self,
            standing={**self.standing, member: "noticed"},
            goes_at_s={**self.goes_at_s, member: goes_at_s},
        )

    def lose(self, member: str) -> Roster:
        """The member's chip has gone at once.

        It may be the one that a picture left out, which does not name chips: then another stays.
        """
        roster, node = self._set(member, "lost"), node_of(member)
        for other in sorted(m for m in roster.withdrawn if node_of(m) == node):
            if len([m for m in roster.up() if node_of(m) == node]) < roster.offered[node]:
                roster = roster._set(other, "up")
        return roster

    def leave(self, member: str) -> Roster:
        """The member's chip has gone in order."""
        return self._set(member, "away")

    def overdue(self, now_s: float) -> list[str]:
        """Members whose notice has run out."""
        return [member for member, goes_at_s in self.goes_at_s.items() if now_s >= goes_at_s]

    def empty_nodes(self) -> frozenset[str]:
        """Nodes none of whose chips is there."""
        return frozenset(map(node_of, self.standing)) - set(map(node_of, self.there()))

    def offer(
        self, chips: Mapping[str, int], goes_at_s: float
    ) -> tuple[Roster, list[str], list[str]]:
        """Takes availability's newest picture: chips by node; absent nodes have none.

        Only what changed since the last picture counts, so that a chip that died comes back when
        the picture says so anew. Gives the members that will go, and those that come.
        """
        going: list[str] = []
        coming: list[str] = []
        offered = {node: chips.get(node, 0) for node in self.nodes}
        for node, count in offered.items():
            if self.offered.get(node) == count:
                continue
            members = [m for m in self.standing if node_of(m) == node]
            up = [m for m in members if self.standing[m] == "up"]
            gone = [m for m in members if self.standing[m] != "up"]
            going += up[count:]
            # one that was noticed is still running, and costs nothing to keep
            gone.sort(key=lambda member: self.standing[member] != "noticed")
            coming += gone[: max(0, count - len(up))]
        roster = replace(self, offered=offered)
        for member in going:
            roster = roster.notice(member, goes_at_s)
        roster = replace(roster, withdrawn=roster.withdrawn.union(going))
        for member in coming:
            roster = roster._set(member, "up")
        return roster, going, coming

    def _set(self, member: str, standing: Standing) -> Roster:
        return replace(
            self,
            standing={**self.standing, member: standing},
            goes_at_s={m: at_s for m, at_s in self.goes_at_s.items() if m != member},
            withdrawn=self.withdrawn - {member},
        )
