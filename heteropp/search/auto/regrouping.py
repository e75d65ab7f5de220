"""A stage's chips as other replicas: in larger or smaller groups, which may cut their sequences."""

from __future__ import annotations

from dataclasses import replace

from heteropp.description.plan import Plan, Replica, Stage
from heteropp.models.spec import ModelError, ModelSpec
from heteropp.search.auto.trials import with_pipelines
from heteropp.search.parts import ways_to_cut


def way_of(stage: Stage, model: ModelSpec) -> int:
    """Returns which of the ways to cut sequences a stage has."""
    ways = ways_to_cut(model, stage.cp, stage.tp)
    parts = stage.replicas[0].token_shares
    return ways.index(parts) if parts in ways else 0


def regrouped(
    stage: Stage, model: ModelSpec, sequences: int, tp: int, cp: int, way: int = 0
) -> Stage | None:
    """Returns a stage with each chip type's ranks, in order, in replicas of cp groups of tp ranks.

    sequences: of its micro-batch, which chip types divide as before, and their replicas evenly.
    way: to cut sequences, or the last where there are fewer. Returns None where ranks or sequences
    are left over, or sequences cannot be cut so.
    """
    try:
        ways = ways_to_cut(model, cp, tp)
    except ModelError:
        return None
    replicas: list[Replica] = []
    for chip in dict.fromkeys(replica.chip for replica in stage.replicas):
        own = [replica for replica in stage.replicas if replica.chip == chip]
        ranks = sorted(rank for replica in own for rank in replica.ranks)
        count, rest = divmod(len(ranks), tp * cp)
        if rest:
            return None
        before = sum(replica.batch_share for replica in own)
        share, rest = divmod(before * sequences, stage.micro_batch * count)
        if rest or not share:
            return None
        replicas += (
            Replica(
                ranks=tuple(ranks[first : first + tp * cp]),
                chip=chip,
                batch_share=share,
                token_shares=ways[min(way, len(ways) - 1)],
            )
            for first in range(0, len(ranks), tp * cp)
        )
    return replace(
        stage,
        replicas=tuple(replicas),
        sequence_parallel=tp > 1 and (stage.sequence_parallel or stage.tp == 1),
    )


def for_longer(plan: Plan, model: ModelSpec, factor: int, way: int) -> Plan | None:
    """Returns a plan for sequences so many times as long, and as many fewer, from one for a model
    whose sequences are that much shorter: replicas that had one each now have parts of one.

    factor: a power of two. way: to cut sequences; see `ways_to_cut`. A stage of too few replicas,
    which had several sequences each, has fewer and longer parts. Returns None where a number of
    sequences is not whole, or replicas offload, which does not go with parts.
    """
    pipelines = []
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            sequences, rest = divmod(stage.micro_batch, factor)
            found = (
                regrouped(stage, model, sequences, stage.tp, cp, way)
                for cp in (factor >> n for n in range(factor.bit_length()))
            )
            longer = None if rest or stage.offload else next(filter(None, found), None)
            if longer is None:
                return None
            stages.append(longer)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return with_pipelines(
        replace(
            plan,
            model=model,
            global_batch=plan.global_batch // factor,
            micro_batch=plan.micro_batch // factor,
        ),
        pipelines,
    )
