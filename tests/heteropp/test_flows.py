"""Arrows of a trace follow every micro-batch through the stages, forwards and back."""

from __future__ import annotations

import pytest
from test_simulate import uniform

from heteropp.schedule.flows import flows, sent_bytes
from heteropp.simulator.simulate import simulate

STAGES, MICRO_BATCHES = 4, 6
CASES = {
    "gpipe": 1,
    "1f1b": 1,
    "zb-h1": 1,
    "interleaved-1f1b": 2,
    "zb-v": 2,
    "chimera": 2,
}


@pytest.mark.parametrize("schedule", CASES)
def test_every_micro_batch_is_followed(schedule: str) -> None:
    ministages = CASES[schedule]
    plan, cluster = uniform(STAGES, MICRO_BATCHES, schedule=schedule, ministages=ministages)
    spans = simulate(plan, cluster).spans
    found = flows(plan, spans)
    # chimera's ministages are two ways, of which a micro-batch goes one
    parts = STAGES * (1 if schedule == "chimera" else ministages)
    for micro_batch in range(MICRO_BATCHES):
        own = [(a, b) for a, b in found if b.micro_batch == micro_batch]
        assert len(own) == 2 * parts - 1  # from part to part, at the last one's turn, and back
        way = {(a.rank, a.ministage, a.name): b for a, b in own}
        assert len(way) == len(own)
        (at,) = {a for a, _ in own} - {b for _, b in own}
        length = 0
        while (key := (at.rank, at.ministage, at.name)) in way:
            assert way[key].start_s >= at.end_s - 1e-9
            at, length = way[key], length + 1
        assert length == len(own)  # one way, without a gap


def test_bytes_sent_are_those_of_the_boundary_tensors() -> None:
    plan, cluster = uniform(STAGES, MICRO_BATCHES)
    model = plan.model
    tensor = plan.micro_batch * model.sequence_length * model.hidden * model.dtype_bytes
    curves = sent_bytes(plan, simulate(plan, cluster).spans)
    neighbours = {0: 1, 1: 2, 2: 2, 3: 1}
    assert {rank: curve[-1][1] for rank, curve in curves.items()} == {
        rank: count * MICRO_BATCHES * tensor for rank, count in neighbours.items()
    }
