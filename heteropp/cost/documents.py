"""What attention within documents takes, beside what a plan is traced with."""

from __future__ import annotations

from collections.abc import Sequence

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
    row_bytes = sum(
        (ROW_BYTES + (QUERY_END_BYTES if first else 0)) * last for first, last in _parts(plan, rank)
    )
    given = 2 * row_bytes * stage.replicas[r].batch_share
    given *= plan.pipelines[p].micro_batches * plan.micro_batch
    return given // sum(replica.batch_share for replica in stage.replicas)


def apart_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of what keeps a micro-batch's documents apart.

    Explicit attention has a mask, which is there twice while a copy of it is filled. A stage that
    computes attention again in the backward keeps the masks of all micro-batches in flight. Fused
    attention needs none.
    """
    p, s, r, _ = plan.place(rank)
    pipeline, stage = plan.pipelines[p], plan.pipelines[p].stages[s]
    share, parts = stage.replicas[r].batch_share, _parts(plan, rank)
    if keeps_no_scores(plan.model):
        return share * POSITION_BYTES * max(last for _, last in parts)
    pairs = [share * last * (last - first) for first, last in parts]
    kept: float
    at_work = kept = max(pairs)
    if stage.selective_recompute:
        kept = sum(pairs) * in_flight(plan.schedule, pipeline, s)
    return round(plan.model.dtype_bytes * (kept + at_work) + at_work)


def _parts(plan: Plan, rank: int) -> Sequence[tuple[int, int]]:
    """Returns the tokens [first, last) of sequences that a rank has at once: in turn, in slices."""
    pipeline = plan.pipelines[plan.place(rank)[0]]
    return pipeline.slice_ranges or [plan.tokens(rank) or (0, plan.model.sequence_length)]
