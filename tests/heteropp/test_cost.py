"""The cost model against arithmetic by hand; test_charged.py holds it against a chip."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest
import torch
from clusters import tiny_model
from tiny_decoders import tiny_config

from ditorch.chips import load_chip
from heteropp.cost.stage_time import (
    StageShape,
    Time,
    all_gather_s,
    all_reduce_s,
    ends_s,
    formula_s,
    stage_memory,
    stage_time,
)
from heteropp.cost.tracing.operators import Trace, count
from heteropp.description.cluster import Link
from heteropp.description.plan import Pipeline, Replica, Schedule, Stage
from heteropp.models.hugging_face.reading import read
from heteropp.models.spec import ModelSpec
from heteropp.schedule.action import Kind
from heteropp.schedule.in_flight import in_flight
from heteropp.schedule.stage_actions import actions

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)


def shape(**changes) -> StageShape:
    base = dict(
        layers=2,
        first=False,
        last=False,
        tp=1,
        dp=1,
        sequences=1,
        zero_stage=1,
        recompute=False,
    )
    return StageShape(**{**base, **changes})


def parameter_bytes(model, layers: int, tp: int = 1) -> int:
    """Returns a rank's bytes of parameters of decoder layers: float32, each padded to 128 bytes."""
    kv = model.kv_heads * model.head_size
    h, i = model.hidden, model.intermediate
    sizes = [h, h * h // tp, kv * h // tp, kv * h // tp, h * h // tp, h]
    sizes += [i * h // tp] * 3
    return layers * sum(-(-size // 32) * 32 for size in sizes) * 4


def test_operators_are_charged_by_the_rule() -> None:
    """2mnk for products, one an element otherwise, every distinct tensor's bytes once."""
    trace = Trace()
    a, b = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    count(trace, lambda: (a @ b).t().relu_().view(7, 3))
    product, relu = trace.operators
    assert (product.name, product.flops, product.bytes) == ("mm", 2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    assert (relu.name, relu.flops, relu.bytes) == ("relu_", 21, 4 * 21)


def test_a_stage_costs_the_same_for_every_further_layer() -> None:
    model, chip = tiny_model(8), load_chip("b-mini")
    times = [stage_time(model, shape(layers=n), chip, LINK, LINK) for n in (1, 2, 5)]
    step = times[1].forward_s - times[0].forward_s
    assert times[2].forward_s == pytest.approx(times[0].forward_s + 4 * step)
    assert times[0].recompute_s == 0
    again = stage_time(model, shape(recompute=True), chip, LINK, LINK)
    assert again.recompute_s == pytest.approx(again.forward_s)


def test_a_stage_on_a_chip_without_limits_costs_its_launches() -> None:
    model, chip = tiny_model(8), load_chip("b-mini")
    endless = replace(
        chip,
        compute=replace(chip.compute, launch_s=1.0, float32_flops=1e30),
        memory=replace(chip.memory, bandwidth_bytes_per_s=1e30),
    )
    forward_s = stage_time(model, shape(layers=1), endless, LINK, LINK).forward_s
    assert forward_s == pytest.approx(round(forward_s))
    assert 15 < forward_s < 40  # a decoder layer is some two dozen operators


def test_tensor_parallelism_pays_for_two_all_reduces_a_layer_and_direction() -> None:
    """Section 2.2: a transformer block's forward needs two all-reduces."""
    model, chip = tiny_model(8), load_chip("a-mini")
    slow = Link(latency_s=10.0, bytes_per_s=1e18)
    none = Link(latency_s=0.0, bytes_per_s=1e18)
    with_, without = (
        stage_time(model, shape(layers=3, tp=2), chip, link, none) for link in (slow, none)
    )
    assert with_.forward_s - without.forward_s == pytest.approx(3 * 2 * 10.0)
    assert with_.backward_s - without.backward_s == pytest.approx(3 * 2 * 10.0)


@pytest.mark.parametrize("family", ["our own", "qwen2", "qwen3_moe"])
def test_sequence_parallelism_gathers_and_scatters_in_place_of_all_reduces(family: str) -> None:
    """Twice each a layer and direction, and once a step sums what norms learnt of their rows."""
    model: ModelSpec = tiny_model(8)
    if family != "our own":
        model = read(tiny_config(family, layers=8).to_dict(), "tiny", sequence_length=32)
    chip = load_chip("a-mini")
    slow = Link(latency_s=10.0, bytes_per_s=1e18)
    none = Link(latency_s=0.0, bytes_per_s=1e18)
    kind = shape(layers=3, tp=2, sequence_parallel=True)
    with_, without = (stage_time(model, kind, chip, link, none) for link in (slow, none))
    assert with_.forward_s - without.forward_s == pytest.approx(3 * 4 * 10.0)
    assert with_.backward_s - without.backward_s == pytest.approx(3 * 4 * 10.0)
    assert with_.reduce_s - without.reduce_s == pytest.approx(10.0)


def test_selective_recompute_keeps_no_scores_and_computes_them_again() -> None:
    model, chip = tiny_model(8), load_chip("a-mini")
    scores = model.heads * model.sequence_length**2 * 4
    kept, again = (
        [stage_memory(model, shape(selective_recompute=chosen), n, 4).kept for n in (1, 2)]
        for chosen in (False, True)
    )
    assert (kept[1] - kept[0]) - (again[1] - again[0]) == 2 * scores  # of two layers
    less, more = (
        stage_time(model, shape(selective_recompute=chosen), chip, LINK, LINK)
        for chosen in (False, True)
    )
    assert less.forward_s == more.forward_s and less.recompute_s == more.recompute_s == 0
    assert less.backward_input_s < more.backward_input_s
    assert less.backward_weight_s == more.backward_weight_s


def test_collectives() -> None:
    assert all_reduce_s(1000, 1, LINK) == all_gather_s(1000, 1, LINK) == 0
    assert all_reduce_s(1000, 2, LINK) == pytest.approx(1e-3 + 1e-3)
    assert all_reduce_s(1e6, 4, LINK) == pytest.approx(2 * (1e-3 + 0.75))
    assert all_gather_s(1e6, 4, LINK) == pytest.approx(1e-3 + 0.75)


def test_no_number_of_layers_is_reduced_in_less_time_than_one() -> None:
    """One layer's gradients go to everyone at once, two layers' by a quicker way."""
    model, chip = tiny_model(8), load_chip("a-mini")
    far = Link(latency_s=1e-6, bytes_per_s=1e6)
    kinds = [shape(layers=layers, dp=8, zero_stage=0) for layers in range(1, 9)]
    times = [stage_time(model, kind, chip, far, far) for kind in kinds]
    size = parameter_bytes(model, 1)
    assert all_reduce_s(2 * size, 8, far) < all_reduce_s(size, 8, far)
    assert all(time.reduce_s >= times[0].reduce_s > 0 for time in times)


def test_memory_of_parameters_gradients_and_optimizer() -> None:
    model = tiny_model(8)
    memory = stage_memory(model, shape(layers=3), in_flight=1, micro_batches=4)
    expected = parameter_bytes(model, 3)
    assert memory.parameters == memory.gradients == expected
    assert memory.optimizer == 2 * expected
    parts = asdict(memory)
    assert memory.recomputed == parts.pop("recomputed") == 0
    assert memory.host == parts.pop("host") == 0
    assert memory.total == sum(parts.values())


def test_zero_1_cuts_the_optimizer_over_the_replicas() -> None:
    model = tiny_model(8)
    whole = stage_memory(model, shape(dp=4, zero_stage=0), 1, 4)
    cut = stage_memory(model, shape(dp=4), 1, 4)
    assert cut.optimizer == whole.optimizer // 4
    assert cut.gradients == whole.gradients  # the reduced shard comes with the update


def test_micro_batches_in_flight_are_charged() -> None:
    model = tiny_model(8)
    one, three = (stage_memory(model, shape(), n, 4) for n in (1, 3))
    assert three.kept - one.kept == 2 * (three.kept // 2) > 0
    recomputed = stage_memory(model, shape(recompute=True), 3, 4)
    activation = model.sequence_length * model.hidden * 4
    assert recomputed.kept == 2 * activation < three.kept


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 9])
def test_boundary_tensors_are_those_of_the_inboxes_and_outboxes(
    schedule: Schedule, recompute: bool, micro_batches: int
) -> None:
    """Predicted memory is the most that a walk through the schedule's actions finds.

    A stage holds one boundary tensor that it awaits from each side, and two that are being sent.
    """
    model = tiny_model(8)
    tensor = model.sequence_length * model.hidden * 4
    alone = Replica(ranks=(0,), chip="a-mini", batch_share=1)
    alike = Stage(layers=(0, 1), recompute=recompute, replicas=(alone,))
    pipeline = Pipeline(micro_batches=micro_batches, stages=(alike,) * 4)
    for index in range(4):
        first, last = index == 0, index == 3
        kind = shape(first=first, last=last, recompute=recompute, schedule=schedule)
        each = stage_memory(model, kind, 2, 4).kept - stage_memory(model, kind, 1, 4).kept
        most = forwards = backwards = 0
        for action in actions(schedule, pipeline, index):
            if action.kind == Kind.F:
                forwards += 1
            elif action.kind in (Kind.B, Kind.I):
                held = (forwards - backwards - 1) * each
                held += tensor * (not first and forwards < micro_batches)  # awaited
                held += tensor * (not last and backwards + 1 < micro_batches)
                held += tensor * (not first) * min(2, backwards)  # leaving
                held += tensor * (not last and recompute) * min(2, forwards)
                most = max(most, held)
                backwards += 1
        memory = stage_memory(model, kind, in_flight(schedule, pipeline, index), micro_batches)
        assert memory.kept + memory.boundary == most, (index, memory)


def test_ministages_in_turn_hold_the_gradients_of_two() -> None:
    """Zorse, section 4.1.2: one ministage at work, and one being reduced; ZeRO-2 cuts the rest."""
    model = tiny_model(8)
    turn = dict(layers=6, ministages=3, schedule="gpipe", dp=4, zero_stage=2)
    little = stage_memory(model, shape(**turn, offload=True, recompute=True), 4.0, 4)
    in_the_end = parameter_bytes(model, 4) + parameter_bytes(model, 6) // 4
    assert little.gradients + little.kept == in_the_end
    much = stage_memory(model, shape(**turn), 4.0, 4)  # most is held when the backwards begin
    assert much.gradients == parameter_bytes(model, 2)
    assert much.parameters == parameter_bytes(model, 6)
    assert much.optimizer == 2 * parameter_bytes(model, 6) // 4
    one_by_one = stage_memory(model, shape(**{**turn, "schedule": "interleaved-1f1b"}), 4.0, 4)
    assert one_by_one.gradients == parameter_bytes(model, 6)


def test_offloading_keeps_two_ministages_and_two_micro_batches() -> None:
    """Zorse, sections 4.1.1 and 4.1.3: what is at work, and what comes next."""
    model, chip = tiny_model(8), load_chip("a-mini")
    activation = model.sequence_length * model.hidden * 4
    turn = dict(layers=6, ministages=3, schedule="gpipe", dp=4, zero_stage=2, recompute=True)
    kept, offloaded = (
        stage_memory(model, shape(**turn, offload=offload), 4.0, 4) for offload in (False, True)
    )
    assert kept.kept == (4 * 3 - 1) * activation
    assert offloaded.kept == activation
    assert offloaded.parameters == parameter_bytes(model, 4)
    # the ministage at work has two layers, as a stage of two layers with nothing else in flight
    two = stage_memory(model, shape(layers=2, recompute=True), 1, 4)
    assert offloaded.working == two.working and offloaded.recomputed == two.recomputed > 0

    time = stage_time(model, shape(**turn, offload=True), chip, LINK, LINK)
    host = chip.links.host_bytes_per_s
    assert time.store_s == time.fetch_s == pytest.approx(3 * activation / host)
    assert time.load_s == pytest.approx(2 * parameter_bytes(model, 6) / 3 / host)
    slow = replace(chip, links=replace(chip.links, host_bytes_per_s=1.0))
    time = stage_time(model, shape(**turn, offload=True), slow, LINK, LINK)
    assert time.micro_batch_s == pytest.approx(2 * 3 * activation)  # nothing hides it


def test_offloading_carries_all_that_a_forward_keeps() -> None:
    model, chip = tiny_model(8), load_chip("a-mini")
    for recompute in (False, True):
        one, two = (stage_memory(model, shape(recompute=recompute), n, 4) for n in (1, 2))
        time = stage_time(model, shape(recompute=recompute, offload=True), chip, LINK, LINK)
        carried = time.store_s * chip.links.host_bytes_per_s
        assert carried == pytest.approx(two.kept - one.kept) and carried > 0


def test_both_halves_of_a_backward() -> None:
    """A layer's input gradient has a product for each of its own forward's, its weights the rest.

    On a chip that only products keep busy: 7 weights, and 2 products of activations with two
    gradients each.
    """
    model, chip = tiny_model(8), load_chip("a-mini")
    products = replace(
        chip,
        compute=replace(chip.compute, launch_s=0.0, efficiency=1e-12),
        memory=replace(chip.memory, bandwidth_bytes_per_s=1e30),
    )
    time = stage_time(model, shape(layers=1), products, LINK, LINK)
    rows, h, i, length = 16, model.hidden, model.intermediate, model.sequence_length
    weights = 2 * rows * (4 * h * h + 3 * h * i)
    attention = 2 * 2 * rows * length * h
    flops_s = chip.compute.float32_flops * 1e-12
    assert time.forward_s * flops_s == pytest.approx(weights + attention, rel=1e-6)
    assert time.backward_input_s * flops_s == pytest.approx(weights + 2 * attention, rel=1e-6)
    assert time.backward_weight_s * flops_s == pytest.approx(weights, rel=1e-6)
    assert time.backward_s == pytest.approx(time.backward_input_s + time.backward_weight_s)


def test_reductions_of_earlier_ministages_hide_behind_later_backwards() -> None:
    model, chip = tiny_model(8), load_chip("a-mini")
    kind = dict(layers=4, dp=2, zero_stage=1)
    for bytes_per_s in (1e3, 1e6, 1e9):
        across = Link(latency_s=0.0, bytes_per_s=bytes_per_s)
        one, four = (
            stage_time(model, shape(**kind, ministages=m), chip, LINK, across) for m in (1, 4)
        )
        assert one.reduce_s == pytest.approx(parameter_bytes(model, 4) / 2 / bytes_per_s)
        assert one.reduce_exposed_s == one.reduce_s
        # a queue: each reduction begins when its backward has ended and the one before has
        reduced_s = computed_s = 0.0
        for _ in range(4):
            computed_s += four.backward_s / 4
            reduced_s = max(reduced_s, computed_s) + four.reduce_s / 4
        assert four.reduce_exposed_s == pytest.approx(reduced_s - computed_s)
        assert four.step_s == pytest.approx(four.reduce_exposed_s + four.norm_s + four.update_s)


def test_collective_parts_are_the_links_share() -> None:
    model, chip = tiny_model(8), load_chip("a-mini")
    none = Link(latency_s=0.0, bytes_per_s=1e30)
    with_, without = (
        stage_time(model, shape(tp=2, dp=2), chip, link, link) for link in (LINK, none)
    )
    for part in ("forward", "backward"):
        whole, free = (getattr(time, f"{part}_s") for time in (with_, without))
        assert getattr(with_, f"{part}_collective_s") == pytest.approx(whole - free)
    assert with_.gather_s == pytest.approx(with_.update_s - without.update_s)


def test_the_ends_of_a_model_add_up() -> None:
    """The head's three products are of 2 x rows x hidden x vocabulary each."""
    model, chip = tiny_model(8), load_chip("a-mini")
    links = LINK, LINK
    middle, both = (
        stage_time(model, shape(first=end, last=end), chip, *links) for end in (False, True)
    )
    embedding_s, head_s = ends_s(model, shape(first=True, last=True), chip, *links)
    assert middle.micro_batch_s + embedding_s + head_s == pytest.approx(both.micro_batch_s)
    assert ends_s(model, shape(), chip, *links) == (0.0, 0.0)
    products = replace(
        chip,
        compute=replace(chip.compute, launch_s=0.0, efficiency=1e-12),
        memory=replace(chip.memory, bandwidth_bytes_per_s=1e30),
    )
    _, head_s = ends_s(model, shape(last=True), products, *links)
    flops = 3 * 2 * model.sequence_length * model.hidden * model.vocab
    assert head_s * chip.compute.float32_flops * 1e-12 == pytest.approx(flops, rel=1e-6)


def test_the_formula_of_a_step() -> None:
    """Section 4.3.2, summed by hand: T is 2, 3, 2.5 s; U 1, 0.5, 4 s."""

    def time(forward_s: float, backward_s: float, update_s: float) -> Time:
        none = dict.fromkeys((field.name for field in fields(Time)), 0.0)
        given = dict(forward_s=forward_s, backward_s=backward_s, update_s=update_s)
        return Time(**{**none, **given})

    times = [time(0.5, 1.5, 1.0), time(1.0, 2.0, 0.5), time(1.0, 1.5, 4.0)]
    assert formula_s(times, 8, 1.0) == pytest.approx(max(16 + 1 + 5.5, 24.5 + 4.5, 20 + 4 + 5))
    assert formula_s(times, 8, 0.0) == pytest.approx(24.5)
