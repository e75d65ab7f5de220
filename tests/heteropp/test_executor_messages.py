"""What ranks send each other in a step, link by link, against what the resolver said they would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import lcm

import pytest
from layouts import lay_out
from parity import STEPS, Ranks
from sampled import sampled

from heteropp.description.plan import Plan, Schedule
from heteropp.layout.hspmd.routing import volume_bytes
from heteropp.layout.resharding import messages
from heteropp.optimizer.replicated_gradients import MINISTAGES, shared, sums
from heteropp.schedule.stage_actions import links


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("layout", "schedule"),
    sampled(
        [
            ("three pipelines", "1f1b"),  # six places sum an embedding, over shards of ZeRO
            ("tied embeddings", "zb-v"),  # of which some are two of one rank
            ("direct", "zb-h1"),
            ("micro-batch 2, 4, 2", "interleaved-1f1b"),
            ("sequence parallel, dropout", "gpipe"),
        ],
        2,
        everyday=1,
    ),
)
def test_every_link_carries_what_was_routed_over_it(
    ranks: Ranks, layout: str, schedule: Schedule
) -> None:
    plan = lay_out(layout, schedule, "float32")
    assert plan is not None
    planned = boundaries(plan) + gradients(plan)
    sent = ranks.train(plan).messages_bytes
    counted = {
        (rank, peer): size_bytes / STEPS
        for rank, by_peer in enumerate(sent)
        for peer, size_bytes in by_peer.items()
    }
    assert counted == planned


def boundaries(plan: Plan) -> Counter[tuple[int, int]]:
    """Returns the bytes of a step's activations and their gradients between each pair of ranks."""
    model = plan.model
    row_bytes = model.hidden * model.dtype_bytes
    found: Counter[tuple[int, int]] = Counter()
    for pipeline in plan.pipelines:
        for (s, _), (t, _) in links(plan.schedule, pipeline):
            if s == t:
                continue
            one, other = pipeline.stages[s], pipeline.stages[t]
            together = lcm(one.micro_batch, other.micro_batch)
            times = pipeline.micro_batches * plan.micro_batch // together
            for pair in ((one, other), (other, one)):
                for message in messages(*pair, model.sequence_length, plan.resharding):
                    link = message.source, message.destination
                    found[link] += times * message.box.shape[0] * row_bytes
    return found


def gradients(plan: Plan) -> Counter[tuple[int, int]]:
    """Returns the bytes between each pair of ranks that sum the gradients of copied parameters."""
    found: Counter[tuple[int, int]] = Counter()
    for places in shared(plan):
        for seats, size_bytes in volume_bytes([sums(plan, places, 4)]).items():
            source, destination = (seat // MINISTAGES for seat in seats)
            if source != destination:
                found[source, destination] += size_bytes
    return found
