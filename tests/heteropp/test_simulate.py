"""The simulator against closed forms, and its deadlock check."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp import simulate as simulator
from heteropp.plan import Pipeline, Plan, Replica, Stage
from heteropp.planned import rank_times
from heteropp.schedule import Action, Kind, in_flight, one_f_one_b
from heteropp.simulate import DeadlockError, simulate


def uniform(stages: int, micro_batches: int, recompute: bool = False):
    """A pipeline of alike chips, one layer each, over links that cost next to nothing."""
    chip = load_chip("a-mini")
    links = replace(
        chip.links, intra_node_bytes_per_s=1e18, intra_node_latency_s=0.0, nic_latency_s=0.0
    )
    cluster = cluster_of(("x", replace(chip, links=links), stages))
    plan = Plan(
        model=tiny_model(stages),
        global_batch=micro_batches,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(
            Pipeline(
                micro_batches=micro_batches,
                stages=tuple(
                    Stage(
                        layers=(s, s + 1),
                        recompute=recompute,
                        replicas=(Replica(ranks=(s,), chip="x", batch_share=1),),
                    )
                    for s in range(stages)
                ),
            ),
        ),
    )
    return plan, cluster


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 4), (4, 16), (6, 2)])
def test_equals_the_closed_form_of_1f1b(monkeypatch, stages: int, micro_batches: int) -> None:
    """(m + P - 1) (F + B) + update, when all stages take the same time."""
    plan, cluster = uniform(stages, micro_batches)
    time = rank_times(plan, cluster)[0]
    monkeypatch.setattr(simulator, "rank_times", lambda *_: [time] * stages)
    expected = (micro_batches + stages - 1) * (time.forward_s + time.backward_s)
    expected += time.norm_s + time.update_s
    assert simulate(plan, cluster).step_s == pytest.approx(expected, rel=1e-9)


def test_messages_take_latency_and_bandwidth_and_wait_for_the_link() -> None:
    plan, cluster = uniform(2, 4)
    fast = simulate(plan, cluster).step_s
    node = cluster.nodes[0]
    links = replace(node.chip.links, intra_node_bytes_per_s=1e3)  # 1 KiB takes a second
    slow_cluster = cluster_of(("x", replace(node.chip, links=links), 2))
    size = plan.model.sequence_length * plan.model.hidden * 4
    slow = simulate(plan, slow_cluster).step_s
    # the last micro-batch waits for three tensors on the link before its own, then comes back
    assert slow >= 4 * size / 1e3
    assert slow <= fast + 8 * size / 1e3


def test_recompute_runs_once_a_micro_batch_and_costs_a_forward() -> None:
    plan, cluster = uniform(3, 5, recompute=True)
    spans = simulate(plan, cluster).spans
    for rank in range(3):
        again = [span for span in spans if span.rank == rank and span.name == Kind.R]
        assert sorted(span.micro_batch for span in again) == list(range(5))
    plain, _ = uniform(3, 5)
    assert simulate(plan, cluster).step_s > simulate(plain, cluster).step_s


def test_spans_of_a_rank_do_not_overlap_and_every_action_has_one() -> None:
    plan, cluster = uniform(4, 8)
    spans = simulate(plan, cluster).spans
    for rank in range(4):
        own = [span for span in spans if span.rank == rank]
        assert len(own) == len(one_f_one_b(plan.pipelines[0], rank))
        for before, after in pairwise(own):
            assert before.end_s <= after.start_s + 1e-12


def test_in_flight_is_what_the_actions_hold() -> None:
    plan, _ = uniform(4, 8)
    for stage in range(4):
        held = most = 0
        for action in one_f_one_b(plan.pipelines[0], stage):
            held += (action.kind == Kind.F) - (action.kind == Kind.B)
            most = max(most, held)
        assert most == in_flight(plan.pipelines[0], stage)


def test_a_deadlock_is_found_and_named(monkeypatch) -> None:
    plan, cluster = uniform(2, 2)

    def backward_first(pipeline: Pipeline, stage: int) -> list[Action]:
        actions = one_f_one_b(pipeline, stage)
        return actions if stage else sorted(actions, key=lambda a: a.kind != Kind.RECV_GRADIENT)

    monkeypatch.setattr(simulator, "one_f_one_b", backward_first)
    with pytest.raises(DeadlockError, match="rank 0 at recv_gradient of micro-batch 0"):
        simulate(plan, cluster)
