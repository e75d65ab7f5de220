"""A stage's chips as other replicas: in larger or smaller groups, which may cut their sequences."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from heteropp.cost.token_shares import token_shares
from heteropp.description.plan import Plan, Replica, Stage
from heteropp.models.spec import ModelError, ModelSpec
from heteropp.search.auto.trials import with_pipelines


@lru_cache(maxsize=1024)
def equal_parts(model: ModelSpec, cp: int, tp: int) -> tuple[int, ...] | None:
    """Returns the tokens that each of cp tensor-parallel groups takes, all chips being alike; None
    where there is one group.

    Raises ModelError where sequences cannot be cut so.
    """
    return token_shares(model, (1.0,) * cp, tp) if cp > 1 else None


def regrouped(stage: Stage, model: ModelSpec, sequences: int, tp: int, cp: int) -> Stage | None:
    """Returns a stage with each chip type's ranks, in order, in replicas of cp groups of tp ranks.

    sequences: of its micro-batch, which chip types divide as before, and their replicas evenly.
    Returns None where ranks or sequences are left over, or sequences cannot be cut so.
    """
    try:
        parts = equal_parts(model, cp, tp)
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
                token_shares=parts,
            )
            for first in range(0, len(ranks), tp * cp)
        )
    return replace(
        stage,
        replicas=tuple(replicas),
        sequence_parallel=tp > 1 and (stage.sequence_parallel or stage.tp == 1),
    )


def for_longer(plan: Plan, model: ModelSpec, factor: int) -> Plan | None:
    """Returns a plan for sequences so many times as long, and as many fewer, from one for a model
    whose sequences are that much shorter: replicas that had one each now have parts of one.

    factor: a power of two. A stage of too few replicas, which had several sequences each, has
    fewer and longer parts. Returns None where a number of sequences is not whole, or replicas
    offload, which does not go with parts.
    """
    pipelines = []
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            sequences, rest = divmod(stage.micro_batch, factor)
            found = (
                regrouped(stage, model, sequences, stage.tp, cp)
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
