"""The same request on another cluster: nodes added or lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from heteropp.description.chips import ChipFileError, load_chip
from heteropp.description.cluster import LARGEST, Cluster, Node, in_order
from heteropp.search.planner import SearchError

CHANGE = re.compile(r"([+-][0-9]{1,18})(?:\s*x\s*([0-9]{1,18}))?\s+(\S+)")


@dataclass(frozen=True)
class ClusterChange:
    """So many nodes of a chip type more, or, if negative, fewer."""

    nodes: int
    chip: str
    chips: int | None = None  # of each of the nodes; None: whatever the cluster's nodes have

    def __str__(self) -> str:
        each = "" if self.chips is None else f"x{self.chips}"
        return f"{self.nodes:+d}{each} {self.chip}"


def parse(text: str) -> list[ClusterChange]:
    """Reads "-1 a, +2x8 b". Raises SearchError."""
    changes = []
    for part in text.split(","):
        match = CHANGE.fullmatch(part.strip())
        if match is None or int(match[1]) == 0 or (match[2] and int(match[2]) == 0):
            raise SearchError(
                f"what-if {text!r}: {part.strip()!r} is no change; expected a number of nodes "
                'with its sign, the chips of each if need be, and a chip, such as "-1 a" or '
                '"+2x8 b"'
            )
        changes.append(ClusterChange(int(match[1]), match[3], int(match[2]) if match[2] else None))
    return changes


def changed(cluster: Cluster, changes: list[ClusterChange]) -> Cluster:
    """Returns the cluster after the changes.

    Nodes are added as copies of the last of their chip type, or where there is none, as its chip
    file has them; they are removed from the last on. Raises SearchError when there are no such
    nodes, too few or too many, or no place for a new one.
    """
    nodes = list(cluster.nodes)
    for change in changes:
        if change.nodes > 0:
            _add(cluster, nodes, change)
        else:
            _remove(cluster, nodes, change)
    if not nodes:
        raise SearchError(f"cluster {cluster.name} would have no nodes left")
    name = f"{cluster.name} {', '.join(map(str, changes))}"
    return replace(cluster, name=name, nodes=in_order(nodes))


def _add(cluster: Cluster, nodes: list[Node], change: ClusterChange) -> None:
    of_chip = [i for i, node in enumerate(nodes) if node.chip_name == change.chip]
    last = of_chip[-1] if of_chip else len(nodes) - 1
    added = _copy(nodes[last], change) if of_chip else _new(cluster, change)
    chips = sum(len(node.ranks) for node in nodes) + change.nodes * len(added.ranks)
    if chips > LARGEST:
        raise SearchError(
            f"cluster {cluster.name} with {change} would have {chips} chips; expected at most "
            f"{LARGEST}"
        )
    nodes[last + 1 : last + 1] = [added] * change.nodes


def _copy(node: Node, change: ClusterChange) -> Node:
    """Returns another node like one of the cluster's, with the chips that the change says."""
    if change.chips is None:
        return replace(node, name="")
    _check_chips(change, node.chip.chips_per_node)
    return replace(node, name="", ranks=range(change.chips), in_use=())


def _new(cluster: Cluster, change: ClusterChange) -> Node:
    """Returns a node of a chip type that the cluster has not."""
    try:
        chip = load_chip(change.chip)
    except ChipFileError as error:
        raise SearchError(f"what-if {str(change)!r}: {error}") from None
    places = {(node.region, node.switch) for node in cluster.nodes}
    if len(places) > 1:
        raise SearchError(
            f"what-if {str(change)!r}: cluster {cluster.name} has no nodes of chip {change.chip}, "
            "and several places where one could be attached; write it into a cluster file"
        )
    [(region, switch)] = places
    chips = change.chips or chip.chips_per_node
    _check_chips(change, chip.chips_per_node)
    return Node(change.chip, chip, range(chips), region, switch)


def _check_chips(change: ClusterChange, most: int) -> None:
    if change.chips is not None and change.chips > most:
        raise SearchError(
            f"what-if {str(change)!r}: a node of chip {change.chip} has {most} chips by its file"
        )


def _remove(cluster: Cluster, nodes: list[Node], change: ClusterChange) -> None:
    fitting = [
        i
        for i, node in enumerate(nodes)
        if node.chip_name == change.chip and change.chips in (None, len(node.ranks))
    ]
    what = "" if change.chips is None else f" with {change.chips} of them"
    if not fitting:
        raise SearchError(
            f"cluster {cluster.name} has no nodes of chip {change.chip}{what}; expected one of "
            f"{', '.join(cluster.chip_names())}"
        )
    if -change.nodes > len(fitting):
        raise SearchError(
            f"cluster {cluster.name} has {len(fitting)} nodes of chip {change.chip}{what}; "
            f"{-change.nodes} cannot be lost"
        )
    for i in reversed(fitting[change.nodes :]):
        del nodes[i]
