"""Which chips there are: the members that a plan may count on, and what became of the others."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from heteropp.description.cluster import Cluster
from heteropp.elastic.messages import node_of

# "up": there; "noticed": there, but will go; "lost": went without notice; "away": went with one, or
# was never there
Standing = Literal["up", "noticed", "lost", "away"]


class Roster:
    def __init__(
        self,
        cluster: Cluster,
        chips: Mapping[str, int] | None = None,
        nodes: Collection[str] | None = None,
    ) -> None:
        """`cluster`: of all chips there may ever be. None: all of its chips, or nodes, are there.

        chips: those there to begin with, by node; nodes: others have nobody to start a member.
        """
        self.cluster = cluster
        self.nodes = [n for n in cluster.node_names if nodes is None or n in nodes]
        self.standing: dict[str, Standing] = dict.fromkeys(cluster.members, "away")
        self.goes_at_s: dict[str, float] = {}  # monotonic, of those that are noticed
        self.offered: dict[str, int] = {}  # by node, as availability was last told
        self.withdrawn: set[str] = set()  # noticed members that availability left out
        if chips is not None:
            self.offer(chips, 0)
            return
        for member in cluster.members:
            if node_of(member) in self.nodes:
                self.standing[member] = "up"

    def up(self) -> set[str]:
        return {member for member, what in self.standing.items() if what == "up"}

    def there(self) -> set[str]:
        """Returns the members whose chips are there: up, or noticed and still to go."""
        return {member for member, what in self.standing.items() if what in ("up", "noticed")}

    def cluster_of(self, members: Iterable[str]) -> Cluster:
        """Raises ValueError when there is none."""
        return self.cluster.kept(map(self.cluster.rank, members))

    def notice(self, member: str, lives_s: float) -> bool:
        """The member's chip will go in so many seconds; gives whether that is news."""
        if self.standing[member] != "up":
            return False
        self.standing[member] = "noticed"
        self.goes_at_s[member] = time.monotonic() + lives_s
        return True

    def lose(self, member: str) -> None:
        """The member's chip has gone at once.

        It may be the one that a picture left out, which does not name chips: then another stays.
        """
        self._set(member, "lost")
        node = node_of(member)
        for other in sorted(m for m in self.withdrawn if node_of(m) == node):
            if len([m for m in self.up() if node_of(m) == node]) < self.offered[node]:
                self._set(other, "up")

    def leave(self, member: str) -> None:
        """The member's chip has gone in order."""
        self._set(member, "away")

    def overdue(self) -> list[str]:
        """Members whose notice has run out."""
        now_s = time.monotonic()
        return [member for member, goes_at_s in self.goes_at_s.items() if now_s >= goes_at_s]

    def empty_nodes(self) -> set[str]:
        """Nodes none of whose chips is there."""
        return set(self.cluster.node_names) - set(map(node_of, self.there()))

    def offer(self, chips: Mapping[str, int], lives_s: float) -> tuple[list[str], list[str]]:
        """Takes availability's newest picture: chips by node; absent nodes have none.

        Only what changed since the last picture counts, so that a chip that died comes back when
        the picture says so anew. Gives the members that will go, and those that come.
        """
        going: list[str] = []
        coming: list[str] = []
        for node in self.nodes:
            count = chips.get(node, 0)
            if self.offered.get(node) == count:
                continue
            self.offered[node] = count
            members = [m for m in self.standing if node_of(m) == node]
            up = [m for m in members if self.standing[m] == "up"]
            gone = [m for m in members if self.standing[m] != "up"]
            going += up[count:]
            # one that was noticed is still running, and costs nothing to keep
            gone.sort(key=lambda member: self.standing[member] != "noticed")
            coming += gone[: max(0, count - len(up))]
        for member in going:
            self.notice(member, lives_s)
            self.withdrawn.add(member)
        for member in coming:
            self._set(member, "up")
        return going, coming

    def _set(self, member: str, standing: Standing) -> None:
        self.standing[member] = standing
        self.goes_at_s.pop(member, None)
        self.withdrawn.discard(member)
