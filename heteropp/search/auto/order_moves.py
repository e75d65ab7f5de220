"""Other orders of a pipeline's stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.search.auto.alike_nodes import nodes_key, stage_nodes
from heteropp.search.auto.busy import with_layers
from heteropp.search.auto.changed import with_stages


def reordered(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Two stages change places, or one goes elsewhere; each keeps its layers. Stages of the same
    chip and degrees count as alike, and so do nodes of one kind that no other pipeline uses. Of
    orders that differ only in which of several alike stages or nodes comes first, one is yielded.
    """
    nodes = [[stage_nodes(s, cluster) for s in pipeline.stages] for pipeline in plan.pipelines]
    for p, pipeline in enumerate(plan.pipelines):
        stages = pipeline.stages
        kinds = [(stage.replicas[0].chip, stage.dp, stage.tp, stage.cp) for stage in stages]
        used = {node for q, own in enumerate(nodes) if q != p for runs in own for node, _ in runs}
        known = {(tuple(kinds), nodes_key(nodes[p], cluster, used))}
        for order in _orders(len(stages)):
            placed = nodes_key([nodes[p][s] for s in order], cluster, used)
            key = tuple(kinds[s] for s in order), placed
            if key not in known:
                known.add(key)
                ordered = [stages[s] for s in order]
                yield with_stages(plan, p, with_layers(ordered, [s.layer_count for s in ordered]))


def _orders(count: int) -> Iterator[list[int]]:
    """Yields orders of so many stages: with two of them exchanged, then with one elsewhere."""
    for i, j in itertools.combinations(range(count), 2):
        order = list(range(count))
        order[i], order[j] = j, i
        yield order
    for i, j in itertools.permutations(range(count), 2):
        order = [s for s in range(count) if s != i]
        order.insert(j, i)
        yield order
