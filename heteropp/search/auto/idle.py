"""Smaller clusters that may be faster, and what the answer says of the chips that stay idle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from heteropp.description.cluster import Cluster, Node
from heteropp.description.plan import Plan
from heteropp.description.used_chips import idle_members
from heteropp.search.skeletons import powers_down

MOST = 256  # smaller clusters that are looked at
LEADING_BITS = 4  # of a number of nodes, that rounding it leaves
NAMED = 8  # chips, in a sentence


def smaller(cluster: Cluster, bound_s: Callable[[Cluster], float]) -> list[Cluster]:
    """Returns clusters of some of the nodes: those of the least bound and the smallest in turn.

    Of nodes that are alike all stay, all but one, half, the largest power of two, or none; or of
    all nodes one, or a part of it.
    """
    kinds = _kinds(cluster)
    found: dict[tuple[int, ...], Cluster] = {}
    for counts in itertools.islice(itertools.product(*map(_counts, kinds)), MOST):
        nodes = [node for alike, n in zip(kinds, counts, strict=True) for node in alike[:n]]
        ranks = tuple(sorted(rank for node in nodes for rank in node.ranks))
        if 0 < len(ranks) < cluster.world_size:
            found.setdefault(ranks, cluster.kept(ranks))
    for first, *_ in kinds:
        for size in {len(first.ranks), *powers_down(len(first.ranks))}:
            if size < cluster.world_size:
                ranks = tuple(first.ranks[:size])
                found.setdefault(ranks, cluster.kept(ranks))
    promising = sorted(found, key=lambda ranks: (bound_s(found[ranks]), -len(ranks), ranks))
    smallest = sorted(found, key=lambda ranks: (len(ranks), ranks))
    in_turn = itertools.chain.from_iterable(zip(promising, smallest, strict=True))
    return [found[ranks] for ranks in dict.fromkeys(in_turn)]


def rounded(cluster: Cluster) -> Cluster:
    """Returns the cluster without the last nodes of each kind, at most one in eight, whose number
    is then a small multiple of a power of two, which data-parallel degrees divide.
    """
    nodes: list[Node] = []
    for alike in _kinds(cluster):
        dropped_bits = max(0, len(alike).bit_length() - LEADING_BITS)
        nodes += alike[: len(alike) >> dropped_bits << dropped_bits]
    if len(nodes) == len(cluster.nodes):
        return cluster
    return cluster.kept(rank for node in nodes for rank in node.ranks)


def _kinds(cluster: Cluster) -> list[list[Node]]:
    """Returns the nodes, those together that are alike."""
    kinds: dict[tuple, list[Node]] = {}
    for node in cluster.nodes:
        key = (node.chip_name, node.chip, node.place, len(node.ranks))
        kinds.setdefault(key, []).append(node)
    return list(kinds.values())


def _counts(nodes: list[Node]) -> list[int]:
    n = len(nodes)
    return list(dict.fromkeys([n, n - 1, n // 2, 1 << (n.bit_length() - 1), 0]))


def why_idle(plan: Plan, cluster: Cluster, all_used_s: float | None) -> Iterator[str]:
    """Yields a sentence on the chips that a plan leaves idle.

    all_used_s: the step of the best plan found that uses all chips; None where none was found.
    """
    idle = idle_members(plan, cluster)
    if not idle:
        return
    names = ", ".join(idle[:NAMED]) + (f" and {len(idle) - NAMED} more" if idle[NAMED:] else "")
    plural = "chip stays" if len(idle) == 1 else "chips stay"
    if all_used_s is None:
        why = "no plan with all chips was found to fit"
    else:
        why = f"the best plan found that uses all chips takes {all_used_s:.4g} s a step"
    yield f"{len(idle)} {plural} idle ({names}): {why}"
