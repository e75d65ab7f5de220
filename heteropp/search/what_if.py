"""The same request on another cluster: nodes added or lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from heteropp.description.cluster import LARGEST, Cluster, in_order
from heteropp.search.planner import SearchError

CHANGE = re.compile(r"([+-]\d+) +(\S+)")


@dataclass(frozen=True)
class ClusterChange:
    """So many nodes of a chip type more, or, if negative, fewer."""

    nodes: int
    chip: str

    def __str__(self) -> str:
        return f"{self.nodes:+d} {self.chip}"


def parse(text: str) -> list[ClusterChange]:
    """Reads "-1 a, +2 b". Raises SearchError."""
    changes = []
    for part in text.split(","):
        match = CHANGE.fullmatch(part.strip())
        if match is None or int(match[1]) == 0:
            raise SearchError(
                f"what-if {text!r}: {part.strip()!r} is no change; expected a number of nodes "
                'with its sign and a chip, such as "-1 a" or "+2 b"'
            )
        changes.append(ClusterChange(int(match[1]), match[2]))
    return changes


def changed(cluster: Cluster, changes: list[ClusterChange]) -> Cluster:
    """Returns the cluster after the changes.

    Nodes are added as copies of the last of their chip type, and removed from the last on. Raises
    SearchError when there are no such nodes, or too few.
    """
    nodes = list(cluster.nodes)
    for change in changes:
        of_chip = [i for i, node in enumerate(nodes) if node.chip_name == change.chip]
        if not of_chip:
            raise SearchError(
                f"cluster {cluster.name} has no nodes of chip {change.chip}; expected one of "
                f"{', '.join(cluster.chip_names())}"
            )
        if -change.nodes > len(of_chip):
            raise SearchError(
                f"cluster {cluster.name} has {len(of_chip)} nodes of chip {change.chip}; "
                f"{-change.nodes} cannot be lost"
            )
        last = of_chip[-1]
        chips = sum(len(node.ranks) for node in nodes) + change.nodes * len(nodes[last].ranks)
        if chips > LARGEST:
            raise SearchError(
                f"cluster {cluster.name} with {change} would have {chips} chips; expected at most "
                f"{LARGEST}"
            )
        if change.nodes > 0:
            nodes[last + 1 : last + 1] = [replace(nodes[last], name="")] * change.nodes
        else:
            del nodes[last + 1 + change.nodes : last + 1]
    if not nodes:
        raise SearchError(f"cluster {cluster.name} would have no nodes left")
    name = f"{cluster.name} {', '.join(map(str, changes))}"
    return replace(cluster, name=name, nodes=in_order(nodes))
