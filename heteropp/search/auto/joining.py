"""Idle chips begin to work: as a stage of their own, or in one more replica of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Replica, Stage
from heteropp.search.auto.busy import with_layers
from heteropp.search.auto.changed import with_one, with_stages
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.trials import ranks_of

STEPS = (1, 2, 4)  # layers, sequences or micro-batches that move at once


def idle_joined(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Yields plans in which one more group of chips of one node works."""
    idle = list(_idle(freedom.request.cluster, set(ranks_of(plan))))
    for replica in idle:
        for p, pipeline in enumerate(plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                if (stage.tp, stage.cp) == (len(replica.ranks), 1):
                    for joined in with_replica(stage, replica, plan.micro_batch):
                        yield with_one(plan, p, s, joined)
    for replica in idle:
        yield from _as_stage(plan, replace(replica, batch_share=plan.micro_batch))


def _idle(cluster: Cluster, used: set[int]) -> Iterator[Replica]:
    """Yields groups of idle chips, one of those that are alike: as large as can be, and halves."""
    known = set()
    for node in cluster.nodes:
        idle = [rank for rank in node.ranks if rank not in used]
        size = (1 << min(len(idle), node.chip.tp_limit).bit_length()) >> 1  # a power of two
        while size:
            kind = node.chip, node.place, len(node.ranks), len(idle), size
            if kind not in known:
                known.add(kind)
                yield Replica(ranks=tuple(idle[:size]), chip=node.chip_name, batch_share=1)
            size //= 2


def _as_stage(plan: Plan, replica: Replica) -> Iterator[Plan]:
    """Yields plans with one more stage, at each place, that takes few layers of the longest."""
    if plan.schedule == "chimera":  # whose number of stages is even
        return
    for p, pipeline in enumerate(plan.pipelines):
        stages = list(pipeline.stages)
        counts = [stage.layer_count for stage in stages]
        few = stages[0].ministages  # a layer for each
        if max(counts) <= few:
            continue
        counts[counts.index(max(counts))] -= few
        for s in range(len(stages) + 1):
            like = stages[max(s - 1, 0)]
            new = replace(
                like,
                replicas=(replica,),
                sequence_parallel=like.sequence_parallel and len(replica.ranks) > 1,
                expert_shares=None,
                expert_capacity=None,
            )
            yield with_stages(
                plan,
                p,
                with_layers([*stages[:s], new, *stages[s:]], [*counts[:s], few, *counts[s:]]),
            )


def with_replica(stage: Stage, replica: Replica, sequences: int) -> Iterator[Stage]:
    """Yields a stage with one more replica, which takes an even share of the sequences or less."""
    even = sequences // (stage.dp + 1)
    for share in sorted({even, *STEPS}, reverse=True):
        if 0 < share <= even:
            rest = scaled(stage, sequences - share)
            yield replace(stage, replicas=(*rest.replicas, replace(replica, batch_share=share)))


def scaled(stage: Stage, total: int) -> Stage:
    """Returns the stage with shares of another total in the same proportions, none empty.

    total: sequences, at least as many as it has replicas.
    """
    before = [replica.batch_share for replica in stage.replicas]
    shares = [1] * stage.dp
    for _ in range(total - stage.dp):
        shares[min(range(stage.dp), key=lambda r: (shares[r] + 1) / before[r])] += 1
    return shared(stage, shares)


def shared(stage: Stage, shares: Iterable[int]) -> Stage:
    """Returns the stage with other shares of a micro-batch."""
    pairs = zip(stage.replicas, shares, strict=True)
    return replace(stage, replicas=tuple(replace(r, batch_share=share) for r, share in pairs))
