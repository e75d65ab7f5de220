"""What a plan takes at least, known before it is simulated: the work of its busiest replica, which
begins when the first forward has come through the stages before it.
"""

from __future__ import annotations

from heteropp.cost.planned import group_links, span_time
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, ministage_layers


def busy_s(plan: Plan, cluster: Cluster) -> float:
    """Returns seconds that a step of a plan takes at least."""
    most_s = 0.0
    for pipeline in plan.pipelines:
        held = ministage_layers(pipeline, plan.schedule)
        come_s = 0.0  # of the first forward, through the stages before
        for s, stage in enumerate(pipeline.stages):
            count = pipeline.micro_batches * pipeline.parts(s)
            if plan.schedule == "chimera":  # a ministage has every other micro-batch
                count = count // 2
            alike = {}
            for replica in stage.replicas:
                for cp_index in range(stage.cp):
                    alike[replica.kind, cp_index] = replica.group(cp_index)[0]
            forwards_s = []
            for rank in alike.values():
                links = group_links(plan, cluster, rank)
                own_s = update_s = 0.0
                for k, span in enumerate(held[s]):
                    time = span_time(plan, cluster, rank, span, links)
                    own_s += count * time.micro_batch_s + time.norm_s
                    update_s += time.update_s
                    if k == 0:
                        forwards_s.append(max(time.forward_s, time.store_s))
                most_s = max(most_s, own_s + max(update_s, come_s))
            if plan.schedule != "chimera":  # whose pipelines begin at both ends
                come_s += min(forwards_s)
    return most_s
