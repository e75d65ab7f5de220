"""Switching between plans: what moves is what the new plan wants, and nobody sends far too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import networkx
import numpy as np
import pytest
from layouts import plan_of, scheduled, turned
from members import Members, whole
from sampled import sampled
from test_context_parallel import cut
from tiny_decoders import tiny_config
from training_run import CHIP, several_pipelines, tiny_model, write_cluster

from heteropp.description.plan import Plan, validate
from heteropp.models.llama.model import LlamaModel
from heteropp.state.slices.holdings import holdings
from heteropp.state.slices.quantities import quantities_of
from heteropp.state.switching.switch import Switch
from heteropp.state.switching.table import Table, table


def micro_batch_2(plan: Plan) -> Plan:
    """Half as large, twice as many."""
    ((pipeline),) = plan.pipelines
    stages = tuple(
        replace(s, replicas=tuple(replace(r, batch_share=2 // s.dp) for r in s.replicas))
        for s in pipeline.stages
    )
    pipeline = replace(pipeline, stages=stages, micro_batches=pipeline.micro_batches * 2)
    return replace(plan, micro_batch=2, pipelines=(pipeline,))


def offloaded(model: LlamaModel) -> Plan:
    plan = plan_of(model, (4, 4), (2, 1), (1, 1), offload=True)
    return scheduled(plan, "interleaved-1f1b", 2)


PLANS: dict[str, Callable[[LlamaModel], Plan]] = {
    "tp 2": lambda m: plan_of(m, (4, 4), (1, 1), (2, 2)),
    "tp 4": lambda m: plan_of(m, (8,), (1,), (4,), sequence_parallel=True),
    "5 ranks": lambda m: turned(plan_of(m, (3, 3, 2), (2, 2, 1), (1, 1, 1))),
    "4 ranks, dp 3": lambda m: plan_of(m, (5, 3), (3, 1), (1, 1), shares={0: (1, 2, 1)}),
    "6 ranks": lambda m: plan_of(m, (2, 4, 2), (2, 1, 1), (1, 2, 2)),
    "two pipelines": lambda m: several_pipelines(
        m, ((5, 3), (1, 1), (1, 2), 1), ((2, 6), (1, 1), (2, 1), 3)
    ),
    "ZeRO-0": lambda m: plan_of(m, (4, 4), (2, 1), (1, 2), zero_stage=0),
    "ZeRO-2": lambda m: micro_batch_2(plan_of(m, (6, 2), (2, 2), (1, 1), zero_stage=2)),
    "cp 2 and 4": lambda m: cut(
        plan_of(m, (5, 3), (1, 1), (2, 4)), {0: [(10, 6)], 1: [(6, 5, 3, 2)]}
    ),
    "chimera": lambda m: scheduled(plan_of(m, (4, 4), (2, 1), (1, 2)), "chimera", 2),
    "offload": offloaded,
}


def plans(model: Any, names: Collection[str] = tuple(PLANS)) -> dict[str, Plan]:
    made = {name: PLANS[name](model) for name in names}
    for plan in made.values():
        validate(plan)
    return made


MODEL = tiny_model(layers=8, kv_heads=4)
LARGE = replace(MODEL, hidden=128, intermediate=352, vocab=1024)


def test_the_plans_train_on_the_same_batches() -> None:
    assert {plan.global_batch for plan in plans(MODEL).values()} == {16}


# ---------------------------------------------------------------- tables


MARKS = [(), pytest.mark.long, *[pytest.mark.exhaustive] * 10]
PAIRS = [
    pytest.param(pair, id=" -> ".join(pair), marks=MARKS[i % 12])
    for i, pair in enumerate(permutations(PLANS, 2))
]


@pytest.mark.parametrize("pair", PAIRS)
def test_nobody_sends_far_more_than_must_be(pair: tuple[str, str]) -> None:
    old, new = (plans(LARGE)[name] for name in pair)
    moved = between(old, new)
    least = least_busiest_bytes(old, new)
    busiest = max(moved.sent_bytes.values(), default=0)
    assert least <= busiest <= 1.25 * least


def between(old: Plan, new: Plan) -> Table:
    return table(old, new, range(old.world_size), range(new.world_size))


def least_busiest_bytes(old: Plan, new: Plan) -> int:
    """What the busiest must send however slices are cut: the least bound that lets all flow.

    Element by element, what each rank wants and does not hold goes to it from those who hold it.
    """
    demands = demands_bytes(old, new)
    total = sum(demands.values())
    flow = networkx.DiGraph()
    for (receiver, holders), size_bytes in demands.items():
        flow.add_edge((receiver, holders), "end", capacity=size_bytes)
        for holder in holders:
            flow.add_edge(holder, (receiver, holders))
    senders = {holder for _, holders in demands for holder in holders}
    fewest, most = 0, total
    while fewest < most:
        bound = (fewest + most) // 2
        for sender in senders:
            flow.add_edge("begin", sender, capacity=bound)
        if networkx.maximum_flow_value(flow, "begin", "end") == total:
            most = bound
        else:
            fewest = bound + 1
    return most


def demands_bytes(old: Plan, new: Plan) -> Counter[tuple[int, frozenset[int]]]:
    """Returns the bytes that each receiver lacks, by (receiver, the ranks that hold them).

    They are counted element by element, on maps of whole tensors.
    """
    held, wanted = maps(old), maps(new)
    itemsizes = {quantity.name: quantity.itemsize for quantity in quantities_of(old.model)}
    demands: Counter[tuple[int, frozenset[int]]] = Counter()
    for (name, quantity), want in wanted.items():
        have = held[name, quantity]
        for receiver in range(new.world_size):
            lacking = (want >> receiver & 1).astype(bool) & ~(have >> receiver & 1).astype(bool)
            for holders, count in zip(*np.unique(have[lacking], return_counts=True), strict=True):
                ranks = frozenset(r for r in range(old.world_size) if holders >> r & 1)
                demands[receiver, ranks] += int(count) * itemsizes[quantity]
    return demands


def maps(plan: Plan) -> dict[tuple[str, str], np.ndarray]:
    """Returns for each whole tensor, element by element, the ranks that hold it as bits."""
    shapes = {p.name: p.shape for p in plan.model.parameters()}
    result: dict[tuple[str, str], np.ndarray] = {}
    for rank in range(plan.world_size):
        for held in holdings(plan, rank, quantities_of(plan.model)):
            key = held.name, held.quantity.name
            ranks = result.setdefault(key, np.zeros(shapes[held.name], np.int64))
            ranks[tuple(slice(*pair) for pair in held.box.ranges)] |= 1 << rank
    return result


def test_a_large_slice_is_shared_by_all_who_hold_it() -> None:
    """A model of one large parameter, of which three replicas have all."""
    model = tiny_model(layers=1, vocab=1 << 15)
    old = plan_of(model, (1,), (3,), (1,), shares={0: (1, 1, 2)}, zero_stage=0)
    new = plan_of(model, (1,), (1,), (1,))
    sent = table(old, new, [0, 1, 2], [3]).sent_bytes
    assert len(sent) == 3
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / 3


def test_between_fast_and_slow_links_the_fast_ones_are_taken() -> None:
    """Two nodes that both hold everything: what a joiner lacks comes from its own."""
    old = plan_of(MODEL, (8,), (2,), (1,), zero_stage=0)
    new = plan_of(MODEL, (4, 4), (1, 2), (1, 1))
    switch = Switch(old, new, ("a-0/0", "b-0/0"), ("a-0/0", "a-0/1", "b-0/1"))
    members = switch.members
    moved = switch.table(lambda a, b: 10.0 if a[:3] == b[:3] else 1.0)
    assert moved.volume_bytes
    assert all(members[a][:3] == members[b][:3] for a, b in moved.volume_bytes)


def test_plans_of_unlike_models_are_refused() -> None:
    old, new = (plan_of(tiny_model(vocab=vocab), (4,), (1,), (1,)) for vocab in (256, 512))
    with pytest.raises(ValueError, match="plans of unlike models, tiny and tiny"):
        between(old, new)


# ---------------------------------------------------------------- in mid-training


def walk(members: Members, tour: Collection[str], steps: int) -> list[float]:
    """The losses of training through plans; each takes the state over bit for bit.

    It is gathered outside of what is tested, from copies of all members' buffers.
    """
    made = plans(members.model, tour)
    random = Random(0)
    losses: list[float] = []
    before: dict[tuple[str, str], np.ndarray] | None = None
    for name in tour:
        plan = made[name]
        told = members.train(plan, random.sample(members.names, plan.world_size), steps)
        came = whole(plan.model, {member: answer.came for member, answer in told.items()})
        if before is not None:
            assert before.keys() == came.keys()
            for key, expected in before.items():
                assert np.array_equal(came[key], expected), f"{key} of {name}"
        before = whole(plan.model, {member: answer.leaves for member, answer in told.items()})
        first, *others = (answer.losses for answer in told.values())
        assert all(other == first for other in others)
        losses += first
    return losses


@pytest.fixture
def start() -> Iterator[Callable[..., Members]]:
    started: list[Members] = []

    def start(*arguments: Any) -> Members:
        started.append(Members(6, *arguments))
        return started[-1]

    yield start
    for members in started:
        members.close()


@pytest.mark.long
def test_training_goes_on_through_each_plan(start: Callable[..., Members]) -> None:
    members = start(MODEL, len(PLANS))
    losses = walk(members, PLANS, 1)
    assert losses == pytest.approx(members.plainly(16), rel=2e-6)


@pytest.mark.exhaustive
def test_training_goes_on_from_any_plan_to_any_other(start: Callable[..., Members]) -> None:
    pairs = list(networkx.eulerian_circuit(networkx.complete_graph(PLANS, networkx.DiGraph())))
    assert set(pairs) == set(permutations(PLANS, 2))
    tour = [pairs[0][0], *(new for _, new in pairs)]
    members = start(MODEL, len(tour))
    losses = walk(members, tour, 1)
    assert losses == pytest.approx(members.plainly(16), rel=2e-6)


@pytest.mark.parametrize("dtype", sampled(["bfloat16", "float16"], 2))
def test_a_model_of_16_bits_takes_its_wide_values_along(
    start: Callable[..., Members], dtype: str
) -> None:
    model = replace(MODEL, dtype=dtype)
    losses = walk(start(model, 8), ["tp 2", "ZeRO-2", "two pipelines", "offload"], 2)
    uninterrupted = walk(start(model, 8), ["tp 2"], 8)
    assert losses == pytest.approx(uninterrupted, rel=2e-3)


@pytest.mark.exhaustive
def test_frozen_weights_move_without_state(start: Callable[..., Members]) -> None:
    from heteropp.models.hugging_face.lora import with_lora
    from heteropp.models.hugging_face.reading import read

    values = tiny_config("qwen3", layers=8).to_dict()
    model = with_lora(read(values, "tiny", sequence_length=16), "r=2,alpha=64")
    tour = ["tp 2", "ZeRO-2", "two pipelines", "offload", "ZeRO-0"]
    members = start(model, 2 * len(tour))
    assert walk(members, tour, 2) == pytest.approx(members.plainly(16), rel=2e-6)


@pytest.mark.exhaustive
def test_biases_of_routers_move_along(start: Callable[..., Members]) -> None:
    from heteropp.models.hugging_face.reading import read

    values = tiny_config("deepseek_v3", layers=8).to_dict()
    model = read(values, "tiny", sequence_length=16, dtype="float64")
    losses = walk(start(model, 8), ["tp 2", "ZeRO-2", "two pipelines", "offload"], 2)
    uninterrupted = walk(start(model, 8), ["tp 2"], 8)
    assert losses == pytest.approx(uninterrupted, rel=2e-6)


@pytest.mark.exhaustive
def test_tied_embeddings_and_dropout(start: Callable[..., Members]) -> None:
    members = start(replace(MODEL, tied_embeddings=True, dropout=0.2), 8)
    losses = walk(members, ["two pipelines", "chimera", "6 ranks", "tp 4"], 2)
    assert losses == pytest.approx(members.plainly(16), rel=2e-6)


def test_chips_move_what_was_planned(start: Callable[..., Members], tmp_path: Path) -> None:
    """Switches over dicomm move as many bytes as planned, by its count of what its links carry."""
    write_cluster(tmp_path, 6)
    members = start(MODEL, 8, tmp_path / CHIP)
    losses = walk(members, ["tp 2", "5 ranks", "two pipelines", "offload"], 2)
    assert losses == pytest.approx(members.plainly(16), rel=2e-6)
    assert members.sent_bytes and members.sent_bytes == members.planned_bytes
