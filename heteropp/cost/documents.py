"""What attention within documents takes, beside what a plan is traced with."""

from __future__ import annotations

from heteropp.description.plan import Plan
from heteropp.schedule.in_flight import in_flight

MAKING_BYTES = 40  # a row, while a stage works out where documents end: int64 and int32 vectors


def documents_bytes(plan: Plan, rank: int) -> int:
    """Returns the most bytes of which row is of which document, and of what is made of it."""
    p, s, r, _ = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    rows = stage.replicas[r].batch_share * plan.model.sequence_length
    # int64, of all micro-batches of this step and of the next
    numbers = 2 * 8 * rows * plan.pipelines[p].micro_batches * plan.micro_batch
    numbers //= sum(replica.batch_share for replica in stage.replicas)
    return numbers + apart_bytes(plan, rank)


def apart_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of what keeps a micro-batch's documents apart.

    Explicit attention has a mask, which is there twice while a copy of it is filled. A stage that
    computes attention again in the backward keeps the masks of all micro-batches in flight. Fused
    attention is told where documents end, and keeps that for the backward.
    """
    p, s, r, _ = plan.place(rank)
    pipeline, stage = plan.pipelines[p], plan.pipelines[p].stages[s]
    rows = stage.replicas[r].batch_share * plan.model.sequence_length
    if plan.model.keeps_no_scores:
        return round(rows * (4 * in_flight(plan.schedule, pipeline, s) + MAKING_BYTES))
    kept = in_flight(plan.schedule, pipeline, s) if stage.selective_recompute else 1
    pairs = rows * plan.model.sequence_length
    return round(pairs * (plan.model.dtype_bytes * (kept + 1) + 1))
