"""What attention within documents takes, beside what a plan is traced with."""

from __future__ import annotations

from heteropp.cost.tracing.scores import keeps_no_scores
from heteropp.description.plan import Plan
from heteropp.schedule.in_flight import in_flight

ROW_BYTES = 8 + 4  # of which document it is, and at most one place where a document ends
QUERY_END_BYTES = 4  # at most one such place more, counted in the rows that attend
POSITION_BYTES = 28  # a row, while its place in its document is worked out: int64 and int32 vectors


def documents_bytes(plan: Plan, rank: int) -> int:
    """Returns the most bytes of which row is of which document, and of what is made of it."""
    return given_bytes(plan, rank) + apart_bytes(plan, rank)


def given_bytes(plan: Plan, rank: int) -> int:
    """Returns the most bytes of which row is of which document, of this step and of the next."""
    p, s, r, _ = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    tokens = plan.tokens(rank)
    _, last = tokens or (0, plan.model.sequence_length)
    rows = stage.replicas[r].batch_share * last
    row_bytes = ROW_BYTES + (QUERY_END_BYTES if tokens else 0)
    given = 2 * row_bytes * rows * plan.pipelines[p].micro_batches * plan.micro_batch
    return given // sum(replica.batch_share for replica in stage.replicas)


def apart_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of what keeps a micro-batch's documents apart.

    Explicit attention has a mask, which is there twice while a copy of it is filled. A stage that
    computes attention again in the backward keeps the masks of all micro-batches in flight. Fused
    attention needs none.
    """
    p, s, r, _ = plan.place(rank)
    pipeline, stage = plan.pipelines[p], plan.pipelines[p].stages[s]
    first, last = plan.tokens(rank) or (0, plan.model.sequence_length)
    rows = stage.replicas[r].batch_share * last
    if keeps_no_scores(plan.model):
        return rows * POSITION_BYTES
    kept = in_flight(plan.schedule, pipeline, s) if stage.selective_recompute else 1
    pairs = rows * (last - first)
    return round(pairs * (plan.model.dtype_bytes * (kept + 1) + 1))
