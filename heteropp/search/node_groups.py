"""Dividing a cluster's nodes into groups, the first phase of Zorse's planner (section 4.3.2).

Data parallelism runs inside a group and pipeline parallelism between groups, so a division should
cut little bandwidth. Whole nodes are divided: cutting chips apart peels off single PCIe chips.
Nodes that are alike (one chip type, size and place) form a class, and every bandwidth depends on
classes alone, so a division is a count of each class in each group. Two families:

- SPLIT: the lightest 2-cut of any group, again and again (Saran and Vazirani). The weight of a cut
  is concave in the number of nodes of each class on one side, so a lightest cut takes each class
  whole, or is a single node: there are few to compare.
- the hierarchy: each class apart, in parts as equal as can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from heteropp.description.cluster import Cluster, Node

Counts = tuple[int, ...]  # nodes of each class
Division = tuple[Counts, ...]  # of every node into groups

MOST_PRODUCTS = 4096  # divisions of the hierarchy that are listed out


@dataclass(frozen=True)
class NodeClass:
    nodes: tuple[Node, ...]

    @property
    def chips(self) -> int:
        return len(self.nodes[0].ranks)

    @property
    def flops(self) -> float:
        """The FLOP/s that one node reaches in bfloat16, the dtype that large models train in."""
        chip = self.nodes[0].chip
        return self.chips * chip.peak_flops("bfloat16") * chip.compute.efficiency


class NodeGroups:
    """A cluster seen as classes of nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        alike: dict[tuple, list[Node]] = {}
        for node in cluster.nodes:
            key = (node.chip_name, node.region, node.switch, len(node.ranks), node.chip)
            alike.setdefault(key, []).append(node)
        self.classes = [NodeClass(tuple(nodes)) for nodes in alike.values()]
        self.everything: Counts = tuple(len(c.nodes) for c in self.classes)

    def divisions(self) -> list[Division]:
        """Returns all divisions that are worth judging: both families, each division once."""
        found = dict.fromkeys(self.splits())
        found.update(dict.fromkeys(self.hierarchy()))
        return list(found)

    def splits(self) -> list[Division]:
        """Returns SPLIT's divisions into 1, 2, ... groups, down to single nodes."""
        groups = [self.everything]
        cuts = [self._lightest_cut(self.everything)]
        result = [tuple(groups)]
        while any(cuts):
            chosen = min(
                (index for index, cut in enumerate(cuts) if cut),
                key=lambda index: (cuts[index], groups[index]),
            )
            cut = cuts[chosen]
            assert cut is not None
            _, part = cut
            rest = tuple(n - m for n, m in zip(groups[chosen], part, strict=True))
            groups[chosen : chosen + 1] = [part, rest]
            cuts[chosen : chosen + 1] = [self._lightest_cut(part), self._lightest_cut(rest)]
            result.append(tuple(sorted(groups, reverse=True)))
        return result

    def hierarchy(self) -> list[Division]:
        """Returns divisions of each class into equal parts.

        They are all combinations or, where those are too many, such as have about equal FLOP/s in
        all groups.
        """
        choices = [_divisors(len(c.nodes)) for c in self.classes]
        if math.prod(len(parts) for parts in choices) <= MOST_PRODUCTS:
            return [self._apart(parts) for parts in itertools.product(*choices)]
        parts = [1] * len(self.classes)
        result = [self._apart(tuple(parts))]
        while True:
            open_classes = [i for i, n in enumerate(self.everything) if parts[i] < n]
            if not open_classes:
                return result
            # the most powerful groups become more
            largest = max(
                open_classes,
                key=lambda i: (self.classes[i].flops * self.everything[i] / parts[i], -i),
            )
            parts[largest] = next(p for p in choices[largest] if p > parts[largest])
            result.append(self._apart(tuple(parts)))

    def nodes(self, division: Division) -> list[list[Node]]:
        """Returns the nodes of each group; a class gives its nodes in order."""
        givers = [iter(c.nodes) for c in self.classes]
        return [
            [next(giver) for giver, n in zip(givers, group, strict=True) for _ in range(n)]
            for group in division
        ]

    def cut_weight(self, part: Counts, rest: Counts) -> float:
        """Returns the bytes per second between all chips of one group and all of another."""
        return sum(
            n * m * self._between[i][j] for i, n in enumerate(part) for j, m in enumerate(rest)
        )

    def _lightest_cut(self, group: Counts) -> tuple[float, Counts] | None:
        """Returns the weight and one side of the lightest 2-cut; None for a single node."""
        if sum(group) == 1:
            return None
        cuts = []
        for part in self._sides(group):
            rest = tuple(n - m for n, m in zip(group, part, strict=True))
            cuts.append((self.cut_weight(part, rest), part))
        return min(cuts)

    def _sides(self, group: Counts) -> Iterator[Counts]:
        present = [i for i, n in enumerate(group) if n]
        for size in range(1, len(present)):
            for whole in itertools.combinations(present, size):
                if present[0] in whole:  # the other side is the same cut
                    yield tuple(n if i in whole else 0 for i, n in enumerate(group))
        for i in present:
            yield tuple(int(j == i) for j in range(len(group)))

    @cached_property
    def _between(self) -> list[list[float]]:
        """Bandwidth between all chips of one node of each class and all of another node."""
        result = []
        for a in self.classes:
            row = []
            for b in self.classes:
                other = b.nodes[-1] if b is a else b.nodes[0]
                link = self.cluster.link(a.nodes[0].ranks.start, other.ranks.start)
                row.append(a.chips * b.chips * link.bytes_per_s)
            result.append(row)
        return result

    def _apart(self, parts: Counts) -> Division:
        groups = []
        for index, (n, count) in enumerate(zip(self.everything, parts, strict=True)):
            size, longer = divmod(n, count)
            for part in range(count):
                nodes = size + (part < longer)
                groups.append(tuple(nodes if i == index else 0 for i in range(len(parts))))
        return tuple(sorted(groups, reverse=True))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
