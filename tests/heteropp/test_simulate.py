"""Simulated steps against closed forms: schedules, gradients, memory, deadlocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from clusters import cluster_of, tiny_model
from invented import Invent

from heteropp.cost.planned import rank_memory, rank_times
from heteropp.cost.stage_time import Time, all_reduce_s
from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.chrome_trace import write_chrome_trace
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Schedule, Stage, validate
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.stage_actions import TableKey, actions, table_of
from heteropp.simulator import program
from heteropp.simulator.picture import draw_simulation, label
from heteropp.simulator.simulate import DeadlockError, simulate


def chip_with(**links: float) -> ChipSpec:
    chip = load_chip("a-mini")
    return replace(chip, links=replace(chip.links, **links))


FREE = chip_with(intra_node_bytes_per_s=math.inf, intra_node_latency_s=0.0, nic_latency_s=0.0)


def plan_of(
    stages: int,
    micro_batches: int,
    schedule: Schedule = "1f1b",
    ministages: int = 1,
    recompute: bool = False,
    dp: int = 1,
    layers: int = 1,  # of a ministage
) -> Plan:
    size = ministages * layers
    plan = Plan(
        model=tiny_model(stages * size),
        global_batch=dp * micro_batches,
        micro_batch=dp,
        schedule=schedule,
        zero_stage=1,
        pipelines=(
            Pipeline(
                micro_batches=micro_batches,
                stages=tuple(
                    Stage(
                        layers=(s * size, (s + 1) * size),
                        recompute=recompute,
                        ministages=ministages,
                        replicas=tuple(
                            Replica(ranks=(s * dp + r,), chip="x", batch_share=1) for r in range(dp)
                        ),
                    )
                    for s in range(stages)
                ),
            ),
        ),
    )
    validate(plan)
    return plan


def uniform(stages: int, micro_batches: int, **changes) -> tuple[Plan, Cluster]:
    """A pipeline of alike chips over links that cost nothing."""
    return plan_of(stages, micro_batches, **changes), cluster_of(("x", FREE, stages))


def layer_time(**seconds: float):
    """A stand-in for the cost model: so many seconds for each layer, of what is given.

    A backward of which no half is given is all in its first.
    """
    seconds.setdefault("backward_input_s", seconds.get("backward_s", 0.0))

    def stage_time(_model, shape, *_, **__):
        given = {name: shape.layers * value for name, value in seconds.items()}
        return Time(**{**dict.fromkeys((f.name for f in fields(Time)), 0.0), **given})

    return stage_time


F, INPUT, WEIGHT = 2.0, 3.0, 1.0
SECONDS = dict(
    forward_s=F, backward_s=INPUT + WEIGHT, backward_input_s=INPUT, backward_weight_s=WEIGHT
)
EQUAL = dict(forward_s=1.0, backward_s=2.0, backward_input_s=1.0, backward_weight_s=1.0)


def compute_end_s(simulation) -> float:
    return max(span.end_s for span in simulation.spans if span.name in ("B", "W"))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 4), (4, 16), (6, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_1f1b_and_gpipe(
    invent_times: Invent, schedule: Schedule, stages: int, micro_batches: int
) -> None:
    """m (F + B) + (P - 1) (F + I), with the update after it."""
    invent_times(layer_time(**SECONDS, update_s=5.0))
    plan, cluster = uniform(stages, micro_batches, schedule=schedule)
    rest_s = simulate(plan, cluster).program.exchange_s + 5.0
    filled = micro_batches * (F + INPUT + WEIGHT) + (stages - 1) * (F + INPUT)
    assert simulate(plan, cluster).step_s == pytest.approx(filled + rest_s, rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 6), (4, 8)])
def test_ministages_divide_the_bubble(
    invent_times: Invent, schedule: Schedule, stages: int, micro_batches: int
) -> None:
    """m v (F + B) + (P - 1) (F + I) of a ministage, where P divides m."""
    invent_times(layer_time(**SECONDS))
    for ministages in (2, 3):
        plan, cluster = uniform(stages, micro_batches, schedule=schedule, ministages=ministages)
        expected = micro_batches * ministages * (F + INPUT + WEIGHT)
        expected += (stages - 1) * (F + INPUT)
        assert compute_end_s(simulate(plan, cluster)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 17)])
def test_zero_bubble(invent_times: Invent, stages: int, micro_batches: int) -> None:
    """ZB-H1 leaves (P - 1) (F + I - W), ZB-V nothing within a stage, where F = I = W."""
    invent_times(layer_time(**EQUAL))
    plan, cluster = uniform(stages, micro_batches, schedule="zb-h1")
    assert compute_end_s(simulate(plan, cluster)) == 3 * micro_batches + stages - 1
    plan, cluster = uniform(stages, micro_batches, schedule="zb-v", ministages=2)
    simulation = simulate(plan, cluster)
    for rank in range(stages):
        works = [s for s in simulation.spans if s.rank == rank and s.name in ("F", "I", "W")]
        if micro_batches >= 2 * stages:  # which the schedule needs to be filled
            assert works[-1].end_s - works[0].start_s == 6 * micro_batches
            assert works[0].start_s == rank


def test_recompute_fills_the_wait_for_the_gradient(invent_times: Invent) -> None:
    """Stage 0 recomputes while it waits for stage 1, so that its recompute costs no time."""
    seconds = dict(forward_s=1.0, recompute_s=1.0, backward_s=1.0)
    invent_times(layer_time(**seconds))
    plan, cluster = uniform(2, 1, recompute=True)
    # F0 then, while stage 1 works for 3, R0; then B0
    assert compute_end_s(simulate(plan, cluster)) == 1 + 3 + 1
    spans = simulate(plan, cluster).spans
    for rank in range(2):
        again = [span for span in spans if span.rank == rank and span.name == Kind.R]
        assert [span.micro_batch for span in again] == [0]


def test_without_overlap_sends_hold_and_recomputes_wait(invent_times: Invent) -> None:
    seconds = dict(forward_s=1.0, recompute_s=1.0, backward_s=1.0)
    invent_times(layer_time(**seconds))
    plan = plan_of(2, 2, recompute=True)
    size = plan.model.sequence_length * plan.model.hidden * 4
    slow = chip_with(intra_node_bytes_per_s=size / 10.0, intra_node_latency_s=0.0)  # 10 s
    simulation = simulate(replace(plan, overlap=False), cluster_of(("x", slow, 2)))
    first = [
        (span.name, span.micro_batch, span.start_s, span.end_s)
        for span in simulation.spans
        if span.rank == 0
    ]
    assert first[:4] == [
        ("F", 0, 0.0, 1.0),
        ("send_activation", 0, 1.0, 11.0),
        ("F", 1, 11.0, 12.0),
        ("send_activation", 1, 12.0, 22.0),
    ]
    # the other works from 11 to 14, and its gradient is there at 24
    assert first[4:7] == [
        ("recv_gradient", 0, 22.0, 24.0),
        ("R", 0, 24.0, 25.0),
        ("B", 0, 25.0, 26.0),
    ]
    assert simulate(plan, cluster_of(("x", slow, 2))).step_s < simulation.step_s


def test_slower_messages_take_so_many_times_as_long(invent_times: Invent) -> None:
    invent_times(layer_time(forward_s=1.0, backward_s=2.0))
    plan = plan_of(2, 1)
    size = plan.model.sequence_length * plan.model.hidden * 4
    chip = chip_with(intra_node_bytes_per_s=size / 0.25, intra_node_latency_s=0.5)
    cluster = cluster_of(("x", chip, 2))
    for factor in (1.0, 4.0):  # there and back
        simulation = simulate(plan, cluster, message_factor=factor)
        assert compute_end_s(simulation) == 2 * (1 + 2) + factor * 2 * (0.5 + 0.25)


def test_offloading_counts_where_computing_does_not_hide_it(invent_times: Invent) -> None:
    seconds = dict(forward_s=1.0, recompute_s=1.0, backward_s=2.0)
    for offload, expected in (
        (dict(store_s=0.5, fetch_s=2.5), 1 + 1 + 2),
        (dict(store_s=1.5, fetch_s=4.0), 1.5 + 4),
    ):
        invent_times(layer_time(**seconds, **offload, load_s=9.0))
        plan, cluster = uniform(1, 4, recompute=True)
        simulation = simulate(plan, cluster)
        assert compute_end_s(simulation) == 4 * expected
        assert simulation.step_s == 4 * expected + 9


def test_spans_of_a_rank_do_not_overlap_and_every_action_has_one() -> None:
    plan, cluster = uniform(4, 8)
    spans = simulate(plan, cluster).spans
    for rank in range(4):
        own = [span for span in spans if span.rank == rank]
        expected = [a.kind for a in actions(plan.schedule, plan.pipelines[0], rank)]
        assert [span.name for span in own] == expected
        for before, after in pairwise(own):
            assert before.end_s <= after.start_s + 1e-12


def test_unequal_replicas_and_chip_types_within_a_stage(invent_times: Invent) -> None:
    """The stage is as slow as the replica that needs longest, then all reduce."""
    fast, slow = FREE, replace(FREE, memory=replace(FREE.memory, capacity_bytes=1))
    cluster = cluster_of(("x", fast, 1), ("y", slow, 1))

    def stage_time(_model, shape, chip, *_, **__):
        busy = shape.sequences * (1.0 if chip is fast else 2.5)
        zeros = dict.fromkeys((f.name for f in fields(Time)), 0.0)
        return Time(**{**zeros, "forward_s": busy, "backward_s": busy, "reduce_s": 7.0})

    invent_times(stage_time)
    replicas = tuple(
        Replica(ranks=(rank,), chip=chip, batch_share=share)
        for rank, chip, share in ((0, "x", 3), (1, "y", 1))
    )
    plan = plan_of(1, 2)
    stage = replace(plan.pipelines[0].stages[0], replicas=replicas)
    plan = replace(
        plan,
        global_batch=8,
        micro_batch=4,
        pipelines=(replace(plan.pipelines[0], stages=(stage,)),),
    )
    validate(plan)
    simulation = simulate(plan, cluster)
    assert simulation.step_s == pytest.approx(2 * 2 * 3.0 + 7.0 + simulation.program.exchange_s)
    share = simulation.stage_shares[0, 0]
    assert share.work == pytest.approx((12 + 10) / 2 / simulation.step_s)
    assert share.bubble == pytest.approx(2 / 2 / simulation.step_s)


def test_pipelines_of_unlike_cuts_sum_gradients_slice_by_slice(invent_times: Invent) -> None:
    """Layers [0, 3), [3, 4), [4, 6) are the common slices of 3 + 3 and 4 + 2 layers."""
    invent_times(layer_time(**EQUAL))
    model = replace(tiny_model(6), hidden=64, intermediate=512)
    links = dict(intra_node_bytes_per_s=1e6, intra_node_latency_s=0.0)
    cluster = cluster_of(("x", chip_with(**links), 4))
    pipelines = tuple(
        Pipeline(
            micro_batches=count,
            stages=tuple(
                Stage(
                    layers=layers,
                    recompute=False,
                    replicas=(Replica(ranks=(rank,), chip="x", batch_share=1),),
                )
                for rank, layers in stages
            ),
        )
        for count, stages in (
            (1, [(0, (0, 3)), (1, (3, 6))]),
            (4, [(2, (0, 4)), (3, (4, 6))]),
        )
    )
    plan = replace(plan_of(1, 1), model=model, global_batch=5, pipelines=pipelines)
    validate(plan)
    simulation = simulate(plan, cluster)
    link = cluster.link(0, 1)

    def sum_s(first: int, last: int) -> float:
        sizes = (p.shape for p in model.parameters((first, last)))
        size = sum(4 * rows * (columns[0] if columns else 1) for rows, *columns in sizes)
        return all_reduce_s(size, 2, link)

    done = {span.rank: span.end_s for span in simulation.spans if span.name in ("B", "W")}
    last = max(done[1], done[3]) + sum_s(4, 6)
    middle = max(last, done[1], done[2]) + sum_s(3, 4)
    first = max(middle, done[0], done[2]) + sum_s(0, 3)
    ends = {span.rank: span.end_s for span in simulation.spans if span.name == Kind.REDUCE}
    assert ends == pytest.approx({0: first, 1: middle, 2: first, 3: last})
    assert simulation.step_s == pytest.approx(first + simulation.program.exchange_s)


# noise and stragglers


def test_a_straggler_slows_the_whole_pipeline(invent_times: Invent) -> None:
    invent_times(layer_time(forward_s=1.0, backward_s=2.0))
    plan, cluster = uniform(4, 16)
    plain = compute_end_s(simulate(plan, cluster))
    slowed = compute_end_s(simulate(plan, cluster, slowdown={2: 1.5}))
    assert plain == (16 + 3) * 3
    # at work from the third second until two backwards before the end, but for one wait
    assert 2 + 16 * 4.5 + 2 * 2 <= slowed <= 16 * 4.5 + 3 * 3
    noisy = [simulate(plan, cluster, noise=0.2, seed=seed).step_s for seed in (1, 1, 2)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert noisy[0] > simulate(plan, cluster).step_s


# deadlocks


def planted(monkeypatch, tables: Callable[[TableKey], list[Action]]) -> None:
    """The simulator takes these tables for the schedule's own."""
    monkeypatch.setattr(program, "table_of", tables)
    monkeypatch.setattr(program, "_ops", program._ops.__wrapped__)  # it keeps those it has made


def test_a_deadlock_is_found_and_named(monkeypatch) -> None:
    plan, cluster = uniform(2, 2)

    def backward_first(key: TableKey) -> list[Action]:
        table = list(table_of(key))
        return table if key.stage else sorted(table, key=lambda a: a.kind != Kind.RECV_GRADIENT)

    planted(monkeypatch, backward_first)
    with pytest.raises(DeadlockError) as caught:
        simulate(plan, cluster)
    assert str(caught.value) == (
        "the schedule cannot go on: rank 0 at recv_gradient of micro-batch 0 waits for rank 1; "
        "rank 1 at recv_activation of micro-batch 0 waits for rank 0"
    )


def test_a_message_that_no_one_sends_is_named(monkeypatch) -> None:
    plan, cluster = uniform(2, 2)

    def mute(key: TableKey) -> list[Action]:
        lost = Action(Kind.SEND_ACTIVATION, 1)
        return [a for a in table_of(key) if a != lost]

    planted(monkeypatch, mute)
    with pytest.raises(DeadlockError, match="micro-batch 1 waits, and no one sends it"):
        simulate(plan, cluster)


def test_unbuffered_1f1b_deadlocks_and_one_tensor_of_slack_frees_it() -> None:
    plan, cluster = uniform(2, 2)
    with pytest.raises(DeadlockError) as caught:
        simulate(plan, cluster, slack=0)
    assert str(caught.value) == (
        "the schedule cannot go on: rank 0 at send_activation of micro-batch 1 waits for rank 1; "
        "rank 1 at send_gradient of micro-batch 0 waits for rank 0"
    )
    assert simulate(plan, cluster, slack=1).step_s == pytest.approx(simulate(plan, cluster).step_s)


# memory


@pytest.mark.parametrize(
    ("schedule", "ministages"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("gpipe", 3),
        ("interleaved-1f1b", 2),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("chimera", 2),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_peaks_where_the_cost_model_says(
    schedule: Schedule, ministages: int, recompute: bool
) -> None:
    plan, cluster = uniform(
        4, 7, schedule=schedule, ministages=ministages, recompute=recompute, layers=2
    )
    simulation = simulate(plan, cluster)
    assert simulation.memory_bytes == [memory.total for memory in rank_memory(plan)]
    for rank in range(4):
        curve = simulation.memory_of(rank)
        assert curve.times_s == sorted(curve.times_s)
        assert curve.bytes[0] == curve.bytes[-1] == min(curve.bytes)
        assert curve.at(curve.times_s[-1]) == curve.bytes[-1]


def test_each_rank_has_the_shard_of_muon_s_state_that_is_its_own() -> None:
    """Muon's state is larger in some shards than in others."""
    plan = replace(plan_of(1, 2, dp=4), optimizer="muon")
    needs = [memory.total for memory in rank_memory(plan)]
    assert len(set(needs)) > 1
    chip = replace(FREE, memory=replace(FREE.memory, capacity_bytes=max(needs) - 1))
    simulation = simulate(plan, cluster_of(("x", chip, 4)))
    assert simulation.memory_bytes == needs
    (sentence,) = simulation.overruns()
    assert f"on rank {needs.index(max(needs))} " in sentence


def test_an_overrun_is_found_where_it_begins() -> None:
    plan, cluster = uniform(3, 6, schedule="gpipe")
    peak = simulate(plan, cluster).memory_bytes[0]
    kept = peak - uniform_peak(3, 5)
    chip = replace(FREE, memory=replace(FREE.memory, capacity_bytes=peak - kept - 1))
    found = simulate(plan, cluster_of(("x", chip, 3))).overruns()
    assert [sentence.split(" needs ")[0] for sentence in found[:1]] == ["stage 0 of pipeline 0"]
    # five lack a byte in their backwards; the sixth comes before these
    assert "on rank 0 at F of micro-batch 5" in found[0]
    roomy = replace(FREE, memory=replace(FREE.memory, capacity_bytes=10 * peak))
    assert simulate(plan, cluster_of(("x", roomy, 3))).overruns() == []


def uniform_peak(stages: int, micro_batches: int) -> int:
    plan, cluster = uniform(stages, micro_batches, schedule="gpipe")
    tokens = 8 * plan.model.sequence_length  # the first stage keeps those of a whole step
    return simulate(plan, cluster).memory_bytes[0] + tokens


# what is shown


def test_rates() -> None:
    plan, cluster = uniform(2, 4)
    one = simulate(plan, cluster)
    tokens = 4 * plan.model.sequence_length / one.step_s
    assert one.tokens_per_s == pytest.approx(tokens)
    assert one.tokens_per_chip_per_s == pytest.approx(tokens / 2)
    busy = [4 * time.micro_batch_s + time.step_s for time in rank_times(plan, cluster)]
    works = [share.work * one.step_s for share in one.shares]
    assert works == pytest.approx(busy)


def test_a_picture_names_the_ranks_that_a_replica_has() -> None:
    plan = plan_of(2, 2)
    replicas = (Replica(ranks=ranks, chip="x", batch_share=1) for ranks in ((0, 2), (1, 3)))
    stages = tuple(
        replace(stage, replicas=(own,))
        for stage, own in zip(plan.pipelines[0].stages, replicas, strict=True)
    )
    apart = replace(plan, pipelines=(Pipeline(micro_batches=2, stages=stages),))
    validate(apart)
    simulation = simulate(apart, cluster_of(("x", FREE, 4)))
    assert [label(simulation, a) for a in range(2)] == [
        "stage 0 ranks 0, 2 (x)",
        "stage 1 ranks 1, 3 (x)",
    ]


def test_pictures_of_few_and_of_many_stages(tmp_path: Path) -> None:
    for stages, micro_batches in ((3, 4), (36, 20)):
        plan, cluster = uniform(stages, micro_batches)
        path = tmp_path / f"{stages}.png"
        draw_simulation(path, simulate(plan, cluster))
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_trace_has_reductions_beside_the_work_and_memory(
    invent_times: Invent, tmp_path: Path
) -> None:
    invent_times(layer_time(**SECONDS, reduce_s=3.0))
    plan, cluster = uniform(2, 3, schedule="gpipe", ministages=2)
    simulation = simulate(plan, cluster)
    path = tmp_path / "trace.json"
    memory = {rank: simulation.memory_of(rank).points() for rank in range(2)}
    write_chrome_trace(path, {"predicted": simulation.spans}, {0: "first", 1: "last"}, memory)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "first", 1: "last", ~0: "reductions of first", ~1: "reductions of last"}
    for thread in names:
        own = [e for e in events if e["ph"] == "X" and e["tid"] == thread]
        for before, after in pairwise(sorted(own, key=lambda e: (e["ts"], e["dur"]))):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    # the later ministage is reduced while the backward of the earlier one runs
    assert [e["cat"] for e in events if e.get("tid") == ~1 and e["ph"] == "X"] == ["reduce"]
    peaks = [
        max(e["args"]["bytes"] for e in events if e["name"] == f"memory of rank {rank}")
        for rank in range(2)
    ]
    assert peaks == simulation.memory_bytes
