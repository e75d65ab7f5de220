"""What crosses the boundaries between stages, as dicomm counts it, and what waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from layouts import SCHEDULES, lay_out
from parity import STEPS, Ranks
from sampled import sampled
from training_run import write_cluster

from heteropp.description.plan import Plan, Schedule, ministage_layers
from heteropp.schedule.inboxes import received_ahead

LAYOUTS = ("tp 1 to 4", "tp 4 to 1", "micro-batch 4, 1", "sequence parallel, dropout")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("chips")
    write_cluster(folder, 5)
    found = Ranks(folder / "neutral.toml")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("schedule", "layout"),
    sampled(
        [(schedule, LAYOUTS[i % len(LAYOUTS)]) for i, schedule in enumerate(SCHEDULES)],
        6,
        everyday=1,
    ),
)
def test_each_byte_crosses_once_and_no_more_room_waits_than_planned(
    ranks: Ranks, schedule: Schedule, layout: str
) -> None:
    plan = lay_out(layout, schedule, "float32")
    assert plan is not None
    trained = ranks.train(plan)
    if schedule != "chimera":  # whose stages send each other the gradients of their copies too
        assert crossed(plan, trained.sent_bytes) == expected(plan)
    ahead = received_ahead(schedule, plan.pipelines[0])
    model = plan.model
    for rank, posted_bytes in enumerate(trained.posted_bytes):
        _, s, r, _ = plan.place(rank)
        stage = plan.pipelines[0].stages[s]
        rows = stage.replicas[r].batch_share * model.sequence_length // stage.tp
        planned = sum(count for inbox, count in ahead.items() if inbox[0] == s)
        assert 0 < posted_bytes <= planned * rows * model.hidden * model.dtype_bytes


def crossed(plan: Plan, sent_bytes: list[Counter[int]]) -> Counter[tuple[int, int]]:
    """Bytes from stage to stage."""
    stage_of = [plan.place(rank)[1] for rank in range(plan.world_size)]
    found: Counter[tuple[int, int]] = Counter()
    for rank, sent in enumerate(sent_bytes):
        for peer, size in sent.items():
            found[stage_of[rank], stage_of[peer]] += size
    return +found


def expected(plan: Plan) -> Counter[tuple[int, int]]:
    """Every activation one way, and its gradient the other, once where stages are unlike."""
    (pipeline,) = plan.pipelines
    model = plan.model
    step_bytes = plan.global_batch * model.sequence_length * model.hidden * model.dtype_bytes
    parts = sorted(
        (layers, s)
        for s, own in enumerate(ministage_layers(pipeline, plan.schedule))
        for layers in own
    )
    found: Counter[tuple[int, int]] = Counter()
    for (_, one), (_, other) in pairwise(parts):
        if one != other:
            found[one, other] += STEPS * step_bytes
            found[other, one] += STEPS * step_bytes
    return found
