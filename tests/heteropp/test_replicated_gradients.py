"""Where parameters stand in flat buffers and at which places of a plan, against every element."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from training_run import several_pipelines, tiny_model

from heteropp.description.plan import Plan, validate
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import layout
from heteropp.optimizer.replicated_gradients import (
    MINISTAGES,
    Exchange,
    Part,
    exchanges,
    holders,
    part_layers,
    shared,
    sums,
)

MODEL = replace(tiny_model(), hidden=8, intermediate=8, vocab=12)


def numbered(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of a box's elements in the whole parameter."""
    whole = Box(tuple((0, size) for size in shape))
    return np.arange(np.prod(shape)).reshape(shape)[box.within(whole)]


@given(
    tp=st.sampled_from((1, 2, 4)),
    shards=st.integers(1, 7),
    layers=st.sampled_from(((0, 4), (1, 3), (3, 4))),
)
@settings(max_examples=25, deadline=None)
def test_pieces_are_what_a_shard_of_the_flat_buffer_holds(
    tp: int, shards: int, layers: tuple[int, int]
) -> None:
    shapes = {p.name: p.shape for p in MODEL.parameters(layers)}
    held = layout(MODEL, layers, tp, tp - 1, shards)
    flat = np.full(held.size, -1)
    names = np.full(held.size, "", dtype=object)
    for entry in held.entries:
        flat[entry.first : entry.last] = numbered(entry.box, shapes[entry.name]).flatten()
        names[entry.first : entry.last] = entry.name
    for index in range(shards):
        found = np.full(held.size, -1)
        for piece in held.pieces(index):
            numbers = numbered(piece.box, shapes[piece.name]).flatten()
            assert (names[piece.first : piece.last] == piece.name).all()
            found[piece.first : piece.last] = numbers
        shard = held.shard(index)
        assert (found[shard] == flat[shard]).all()
        assert (np.delete(found, np.r_[shard]) == -1).all()


PIPELINES = st.lists(
    st.sampled_from(
        [
            ((4,), (1,), (1,)),
            ((1, 3), (2, 1), (1, 2)),
            ((2, 2), (1, 4), (2, 1)),
            ((3, 1), (3, 2), (1, 2)),
            ((1, 1, 2), (1, 2, 1), (2, 1, 2)),
        ]
    ),
    min_size=1,
    max_size=3,
)


@given(pipelines=PIPELINES, zero_stage=st.sampled_from((0, 1, 2)), tied=st.booleans())
@settings(max_examples=12, deadline=None)
def test_every_rank_sums_once_from_each_place_what_it_keeps(
    pipelines: list, zero_stage: int, tied: bool
) -> None:
    model = replace(MODEL, tied_embeddings=tied)
    plan = several_pipelines(model, *((*shape, 1) for shape in pipelines), micro_batch=12)
    plan = replace(plan, zero_stage=zero_stage)
    validate(plan)
    places = {name: parts for name, parts in holders(plan).items() if len(parts) > 1}
    keeps = {
        (part, rank): kept(plan, part, rank)
        for part in part_layers(plan)
        for rank in ranks(plan, part)
    }
    parameters = model.parameters()
    part_of = {rank: part for part, rank in keeps}  # no rank of these plans holds two ministages
    summed: Counter[tuple[int, str, int]] = Counter()
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for where in shared(plan):
        for transfer in sums(plan, where, 4):
            parameter = parameters[transfer.tensor]
            numbers = numbered(transfer.box, parameter.shape).flatten()
            rank = transfer.receiver // MINISTAGES
            senders = [sender // MINISTAGES for sender in transfer.senders]
            assert [part_of[sender] for sender in senders] == places[parameter.name]
            for sender in senders:
                assert set(numbers) <= keeps[part_of[sender], sender][parameter.name]
                if sender != rank:
                    sent[sender] += len(numbers)
                    received[rank] += len(numbers)
            assert rank in senders
            summed.update((rank, parameter.name, number) for number in numbers)
    wanted = {
        (rank, name, number)
        for (_, rank), held in keeps.items()
        for name, numbers in held.items()
        if name in places
        for number in numbers
    }
    assert set(summed) == wanted
    assert set(summed.values()) <= {1}
    counted = exchanges(plan)
    for rank in part_of:
        found = counted.get((rank, part_of[rank][2]), Exchange())
        assert (found.sent, found.received) == (sent[rank], received[rank])
        own = {name: len(numbers) for name, numbers in keeps[part_of[rank], rank].items()}
        others = {name: len(places.get(name, [0])) - 1 for name in own}
        assert found.received == sum(others[name] * n for name, n in own.items())


def ranks(plan: Plan, part: Part) -> list[int]:
    p, s, _ = part
    return [rank for replica in plan.pipelines[p].stages[s].replicas for rank in replica.ranks]


def kept(plan: Plan, part: Part, rank: int) -> dict[str, set[int]]:
    """The elements of parameters whose sum over the replicas ends at a rank, by counting them."""
    p, s, r, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    layers = part_layers(plan)[part]
    found: dict[str, set[int]] = {}
    position, elements = 0, []
    parameters = plan.model.parameters(layers)
    inside = [p for p in parameters if p.name.startswith("layers.") and len(p.shape) == 2]
    ends = [p for p in parameters if p not in inside and len(p.shape) == 2]
    for parameter in [*inside, *ends, *(p for p in parameters if len(p.shape) == 1)]:
        box = parameter.boxes(stage.tp, tp_index)[0]
        for number in numbered(box, parameter.shape).flatten():
            elements.append((position, parameter.name, number))
            position += 1
        position = -(-position // 32) * 32
    shards = stage.dp if plan.zero_stage else 1
    size = -(-position // (32 * shards)) * 32
    for position, name, number in elements:
        if shards == 1 or position // size == r:
            found.setdefault(plan.model.global_name(name), set()).add(number)
    return found


def test_a_tied_head_stands_with_the_embedding() -> None:
    model = replace(MODEL, tied_embeddings=True)
    one = several_pipelines(model, ((4,), (1,), (1,), 1), micro_batch=1)
    assert holders(one)["embedding.weight"] == [(0, 0, 0)]
    two = several_pipelines(model, ((2, 2), (1, 1), (1, 1), 1), ((4,), (1,), (1,), 1))
    assert holders(two)["embedding.weight"] == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
    assert "head.weight" not in holders(two)
