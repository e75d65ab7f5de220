"""Replicas that do the same at the same times: one of them is compiled and played for all.

Replicas are joined where messages go between them, or pass the same NIC or the same link of the
fabric on their way. Parts of a plan that nothing joins, and that are alike in everything but the
numbers of their ranks, nodes and NICs, take the same times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import product

from heteropp.description.cluster import Cluster, Port
from heteropp.simulator.boundaries import Boundary

Ranks = Sequence[int]
_Sends = tuple[int, tuple[int, ...]]  # Boundary.alike of a sender, and its receivers' numbers
Joint = tuple[int, int, Boundary]  # numbers of a sending and a receiving stage's first replicas


def stand_ins(
    cluster: Cluster,
    replicas: Sequence[Ranks],
    own: Sequence[Hashable],
    joints: Iterable[Joint],
    shared_pipes: bool,
) -> list[int]:
    """Returns, by replica, the first one that does the same at the same times.

    own: what else each replica's work depends on. shared_pipes: messages of several pairs of ranks
    pass the same pipes, as Cluster.route() has them.
    """
    sent: list[list[_Sends]] = [[] for _ in replicas]
    for first, other, boundary in joints:
        for r, receivers in enumerate(boundary.receivers):
            to = tuple([other + receiver for receiver in receivers])
            sent[first + r].append((boundary.alike[r], to))
    pairs = {(a, b) for a, sends in enumerate(sent) for _, to in sends for b in to}
    ports = [[cluster.port(rank) for rank in ranks] for ranks in replicas]
    parts = _Parts(len(replicas))
    for a, b in pairs:
        parts.join(a, b)
    if shared_pipes:
        for pipe, a in _used(cluster, ports, pairs):
            parts.join_users(pipe, a)
    found = list(range(len(replicas)))
    models: dict[Hashable, list[int]] = {}
    for part in parts.members():
        ranks, kind = [replicas[a] for a in part], [own[a] for a in part]
        key = _signature(cluster, part, ranks, [ports[a] for a in part], [sent[a] for a in part])
        for a, b in zip(part, models.setdefault((*kind, key), part), strict=True):
            found[a] = b
    return found


def _used(
    cluster: Cluster, ports: Sequence[Sequence[Port]], pairs: Iterable[tuple[int, int]]
) -> Iterator[tuple[Hashable, int]]:
    """Yields each pipe that messages of several replicas may pass, with a replica of which some do.

    pairs: of replicas between which messages go.
    """
    nodes = [{port.node for port in each} for each in ports]
    apart = [(a, b) for a, b in pairs if len(nodes[a] | nodes[b]) > 1]
    for a in {a for pair in apart for a in pair}:
        yield from ((port, a) for port in ports[a])
    if not cluster.fabric.links:
        return
    places = [{cluster.nodes[node].place for node in each} for each in nodes]
    for a, b in apart:
        for one, other in product(places[a], places[b]):
            yield from ((pipe.name, a) for pipe in cluster.fabric.path(one, other).pipes)


def _signature(
    cluster: Cluster,
    part: Sequence[int],
    ranks: Sequence[Ranks],
    ports: Sequence[Sequence[Port]],
    sent: Sequence[Sequence[_Sends]],
) -> Hashable:
    """Returns a key, equal for parts that differ only in the numbers of replicas, ranks, nodes and
    NICs, and not in their ranks' order.
    """
    number = {a: i for i, a in enumerate(part)}
    order = {rank: i for i, rank in enumerate(sorted(rank for own in ranks for rank in own))}
    kinds, nodes, nics = cluster.node_kinds, dict[int, int](), dict[Port, int]()
    return tuple(
        [
            (
                tuple([order[rank] for rank in own]),
                tuple(
                    [
                        (
                            nodes.setdefault(port.node, len(nodes)),
                            nics.setdefault(port, len(nics)),
                            kinds[port.node],
                        )
                        for port in own_ports
                    ]
                ),
                tuple([(alike, *[number[b] for b in to]) for alike, to in sends]),
            )
            for own, own_ports, sends in zip(ranks, ports, sent, strict=True)
        ]
    )


class _Parts:
    """Which numbers are joined, directly or through others."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._user: dict[Hashable, int] = {}

    def join(self, a: int, b: int) -> None:
        one, other = self._root(a), self._root(b)
        self._parent[max(one, other)] = min(one, other)

    def join_users(self, of: Hashable, a: int) -> None:
        """Joins a number with all others that use something."""
        self.join(self._user.setdefault(of, a), a)

    def members(self) -> list[list[int]]:
        """Returns the parts, each in ascending order."""
        parts: dict[int, list[int]] = defaultdict(list)
        for a in range(len(self._parent)):
            parts[self._root(a)].append(a)
        return list(parts.values())

    def _root(self, a: int) -> int:
        parent = self._parent
        while parent[a] != a:
            parent[a] = a = parent[parent[a]]
        return a
