"""The plans of a run of mixed lengths: of one model, on the same ranks, each for one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from heteropp.data.sequences import AttentionWithin
from heteropp.description.plan import Plan, PlanError


def by_length(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Sorts plans by length, the shortest first: it has most documents, so it is home.

    Raises PlanError for plans that cannot share a step.
    """
    plans = sorted(plans, key=_length)
    first = plans[0]
    for plan, longer in pairwise(plans):
        if _length(plan) == _length(longer):
            raise PlanError(
                f"two plans have sequence_length {_length(plan)}; expected one a length"
            )
    for plan in plans:
        length = _length(plan)
        if replace(plan.model, sequence_length=_length(first)) != first.model:
            raise PlanError(
                f"the plans of sequence_length {_length(first)} and {length} have unlike models; "
                "expected one that differs in sequence_length alone"
            )
        if plan.world_size != first.world_size:
            raise PlanError(
                f"the plans of sequence_length {_length(first)} and {length} have "
                f"{first.world_size} and {plan.world_size} ranks; expected the same"
            )
        if any(stage.offload for p in plan.pipelines for stage in p.stages):
            raise PlanError(
                f"the plan of sequence_length {length} offloads; parameters that go from plan to "
                "plan must stay on the chip (heteropp-search --schedule 1f1b finds another plan)"
            )
        if plan.has_context_parallelism:
            raise PlanError(
                f"the plan of sequence_length {length} has token_shares; mixed lengths do not go "
                "with context parallelism yet (heteropp-search --context-parallel 1 finds another "
                "plan)"
            )
        if plan.has_slices:
            raise PlanError(
                f"the plan of sequence_length {length} has token_slices; mixed lengths do not go "
                "with slices of sequences"
            )
        if any(stage.expert_capacity for p in plan.pipelines for stage in p.stages):
            raise PlanError(
                f"the plan of sequence_length {length} has expert_capacity; padding is routed to "
                "the same few experts, which may exceed any; expected none"
            )
        if problem := plan.model.mixed_lengths_problem():
            raise PlanError(problem)
    return tuple(plans)


def what_is_learnt(
    plan: Plan, by_length: Sequence[Plan], documents: int, within: AttentionWithin
) -> dict[str, Any]:
    """Returns the entries of a checkpoint's manifest that a resume must not change, whatever its
    plans are.

    by_length: the plans of a run of mixed lengths, which trains on `documents` a step; empty for
    any other run, whose attention is `within` a document or a sequence.
    """
    if not by_length:
        return {
            "model": plan.model,
            "global_batch": plan.global_batch,
            "attention_within": within,
        }
    return {"model": by_length[-1].model, "global_batch": documents, "whole_documents": True}


def shortest_that_holds(plans: Sequence[Plan], lengths: np.ndarray) -> np.ndarray:
    """The plan of each document, from 0, by how many tokens are learnt of it."""
    return np.searchsorted([_length(plan) for plan in plans], lengths)


def passes(plan: Plan, sequences: int) -> list[int]:
    """Micro-batches of each time that a step runs the plan; only in the last they may be fewer."""
    whole = sum(pipeline.micro_batches for pipeline in plan.pipelines)
    times, rest = divmod(-(-sequences // plan.micro_batch), whole)
    return [whole] * times + [rest] * (rest > 0)


def with_micro_batches(plan: Plan, count: int) -> Plan:
    """The plan for fewer micro-batches a step, shared out over its pipelines as its own are.

    No pipeline is left without, so that there may be a few more.
    """
    least = 2 if plan.schedule == "chimera" else 1
    taken = [min(least, pipeline.micro_batches) for pipeline in plan.pipelines]
    while sum(taken) < count:
        relative = [
            (have + 1) / pipeline.micro_batches
            for have, pipeline in zip(taken, plan.pipelines, strict=True)
        ]
        taken[relative.index(min(relative))] += 1
    return replace(
        plan,
        global_batch=sum(taken) * plan.micro_batch,
        pipelines=tuple(
            replace(pipeline, micro_batches=count)
            for pipeline, count in zip(plan.pipelines, taken, strict=True)
        ),
    )


def _length(plan: Plan) -> int:
    return plan.model.sequence_length
