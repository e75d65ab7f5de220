"""What goes from stage to stage in a step: the way of each micro-batch, and the bytes sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from heteropp.description.plan import Pipeline, Plan, Stage
from heteropp.description.timeline import Span
from heteropp.layout.resharding import common_multiple, messages
from heteropp.schedule.action import BACKWARD, Kind
from heteropp.schedule.stage_actions import Part, links

# of a part of a stage: (kind, micro-batch), then the span of the first rank of each replica
_Held = dict[tuple[int, int, Part], dict[tuple[str, int], Span]]


def flows(plan: Plan, spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Pairs of a micro-batch's actions, of which the second takes what the first gives.

    Forwards from stage to stage, the last one's backward, and backwards in return. Of the ranks of
    a replica the first stands for all.
    """
    held: _Held = defaultdict(dict)
    for span in spans:
        p, s, r, tp_index = plan.place(span.rank)
        is_first = tp_index == plan.cp_index(span.rank) == 0
        if is_first and span.micro_batch is not None:
            kind = "B" if span.name in BACKWARD else span.name
            held[p, r, (s, span.ministage)][kind, span.micro_batch] = span
    found: list[tuple[Span, Span]] = []
    for p, pipeline in enumerate(plan.pipelines):
        joined = links(plan.schedule, pipeline)
        for before, after in joined:
            for sender, receiver in _meeting(held, p, pipeline, "F", before, after):
                found.append((sender, receiver))
            for receiver, sender in _meeting(held, p, pipeline, "B", before, after):
                found.append((sender, receiver))
        firsts, lasts = {part for part, _ in joined}, {part for _, part in joined}
        for part in (lasts - firsts) or {(0, 0)}:
            for r in range(pipeline.stages[part[0]].dp):
                own = held[p, r, part]
                for (kind, micro_batch), span in own.items():
                    if kind == "F" and ("B", micro_batch) in own:
                        found.append((span, own["B", micro_batch]))
    return found


def _meeting(
    held: _Held, p: int, pipeline: Pipeline, kind: str, before: Part, after: Part
) -> Iterator[tuple[Span, Span]]:
    """Yields the actions of two parts that work on the same sequences."""
    ones = _sequences(held, p, pipeline, kind, before)
    others = _sequences(held, p, pipeline, kind, after)
    i = j = 0
    while i < len(ones) and j < len(others):
        (a_first, a_last, a), (b_first, b_last, b) = ones[i], others[j]
        if max(a_first, b_first) < min(a_last, b_last):
            yield a, b
        i, j = (i + 1, j) if a_last <= b_last else (i, j + 1)


def _sequences(
    held: _Held, p: int, pipeline: Pipeline, kind: str, part: Part
) -> list[tuple[int, int, Span]]:
    """Lists (first, last, action) in order: a part's actions of a kind, each on the sequences
    [first, last) of its pipeline.
    """
    stage = pipeline.stages[part[0]]
    found = []
    for r, (first, last) in enumerate(stage.shares):
        for (its_kind, micro_batch), span in held[p, r, part].items():
            if its_kind == kind:
                offset = micro_batch * stage.micro_batch
                found.append((offset + first, offset + last, span))
    return sorted(found, key=lambda one: one[:2])


def sent_bytes(plan: Plan, spans: Sequence[Span]) -> dict[int, list[tuple[float, int]]]:
    """Returns, by rank, (seconds, the bytes that it has sent to other stages by then)."""
    sizes: dict[tuple[int, str, int], list[int]] = {}  # of one send, by slice
    for pipeline in plan.pipelines:
        lengths = pipeline.token_slices or (plan.model.sequence_length,)
        for (s, k), (t, j) in links(plan.schedule, pipeline):
            if s == t:
                continue
            one, other = pipeline.stages[s], pipeline.stages[t]
            for rank, by_slice in _sizes(plan, one, other, lengths).items():
                sizes[rank, Kind.SEND_ACTIVATION, k] = by_slice
            for rank, by_slice in _sizes(plan, other, one, lengths).items():
                sizes[rank, Kind.SEND_GRADIENT, j] = by_slice
    curves: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.end_s):
        own = span.rank, span.name, span.ministage
        if own in sizes:
            curve, by_slice = curves[span.rank], sizes[own]
            size = by_slice[(span.micro_batch or 0) % len(by_slice)]
            curve.append((span.end_s, size + (curve[-1][1] if curve else 0)))
    return dict(curves)


def _sizes(
    plan: Plan, sender: Stage, receiver: Stage, lengths: Sequence[int]
) -> dict[int, list[int]]:
    """Returns the bytes that each rank sends of one of its stage's micro-batches, by slice.

    lengths: the tokens of each sequence that are in a slice.
    """
    row_bytes = plan.model.hidden * plan.model.dtype_bytes
    at_once = common_multiple(sender, receiver)[0].micro_batch // sender.micro_batch
    found: dict[int, list[int]] = defaultdict(lambda: [0] * len(lengths))
    for j, length in enumerate(lengths):
        for message in messages(sender, receiver, length, plan.resharding):
            found[message.source][j] += message.box.shape[0] * row_bytes
    return {rank: [size // at_once for size in sizes] for rank, sizes in found.items()}


def slices_by_rank(plan: Plan) -> dict[int, int]:
    """Returns the number of slices of each rank whose pipeline runs some."""
    return {
        rank: pipeline.slices
        for pipeline in plan.pipelines
        if pipeline.token_slices
        for stage in pipeline.stages
        for replica in stage.replicas
        for rank in replica.ranks
    }
