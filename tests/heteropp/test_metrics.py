"""What a run says of its steps: shares of time, utilization, slow ranks."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import cluster_of
from torch.utils.flop_counter import FlopCounterMode
from training_run import make_plan, tiny_model

from ditorch.chips import load_chip
from heteropp.description.plan import Pipeline, Plan
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.runtime.executor import StepResult
from heteropp.runtime.measuring.gauges import Gauges
from heteropp.runtime.measuring.metrics import EventClock, HostClock, StepMetrics, clock_of
from heteropp.runtime.measuring.report import Reporter, Summary
from heteropp.runtime.measuring.shares import Ran, StepEnds, divide
from heteropp.runtime.measuring.stragglers import PATIENCE, Stragglers
from heteropp.runtime.measuring.waits import HostWaits
from heteropp.runtime.ranks.device import Device
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.step_times import LinkTimes
from heteropp.simulator.expectation import links_of
from heteropp.simulator.simulate import Simulation, simulate

PLANS = {
    "1f1b": make_plan(tiny_model(), (1, 2, 1), (2, 1, 1), (1, 2, 1), (True, False, True)),
    "broadcast": replace(
        make_plan(tiny_model(), (2, 2), (1, 2), (2, 2), (False, True)), resharding="broadcast"
    ),
    "unlike micro-batches": make_plan(
        tiny_model(), (2, 2), (2, 1), (1, 1), (False, True), micro_batch=4
    ),
    "zb-v": replace(
        make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False)), schedule="zb-v"
    ),
}
PLANS["zb-v"] = replace(
    PLANS["zb-v"],
    pipelines=tuple(
        replace(p, stages=tuple(replace(stage, ministages=2) for stage in p.stages))
        for p in PLANS["zb-v"].pipelines
    ),
)
first, second = PLANS["unlike micro-batches"].pipelines[0].stages
half = tuple(replace(replica, batch_share=1) for replica in first.replicas)
PLANS["unlike micro-batches"] = replace(
    PLANS["unlike micro-batches"],
    pipelines=(Pipeline(micro_batches=4, stages=(replace(first, replicas=half), second)),),
)


def simulated(plan: Plan) -> Simulation:
    """Simulates the plan on links so slow that messages take a part of the step.

    Under zb-v, which has two ministages, they are so fast that no message waits for another.
    """
    chip = load_chip("a-mini")
    rate = 2e8 if plan.schedule == "zb-v" else 1e6
    slow = replace(chip, links=replace(chip.links, intra_node_bytes_per_s=rate))
    return simulate(plan, cluster_of(("x", slow, plan.world_size)), emulated=True)


def as_a_rank_sees(simulation: Simulation, actor: int) -> tuple[list[Ran], StepEnds]:
    """A replica's step by its own clock: the last action begins with the wait for sums."""
    program, timing = simulation.program, simulation.timing
    rows = list(zip(program.tables[actor], timing.starts[actor], timing.ends[actor], strict=True))
    ran = [(x, begin, begin if x.kind == Kind.REDUCE else end) for x, begin, end in rows[:-1]]
    last, reduced_s, end_s = rows[-1]
    idle_since_s = max(end for _, _, end in ran)
    step = StepEnds(reduced_s, reduced_s + program.norm_s[actor], end_s - program.update_s[actor])
    return [*ran, (last, idle_since_s, end_s)], step


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_divides_its_step_as_the_simulator_does(name: str) -> None:
    simulation = simulated(PLANS[name])
    for actor, seat in enumerate(simulation.program.seats):
        links = links_of(simulation, seat.ranks[0])
        share = divide(*as_a_rank_sees(simulation, actor), links)
        expected = simulation.shares[actor]
        assert share.work == pytest.approx(expected.work, rel=1e-9)
        # the parts of a tensor queue on one link, which a rank cannot tell from a late sender
        queueing = 0.005 if name == "unlike micro-batches" else 1e-9
        assert share.communication == pytest.approx(expected.communication, rel=1e-6, abs=queueing)
        assert share.bubble == pytest.approx(expected.bubble, rel=1e-6, abs=queueing)
        assert share.communication > 0


def test_where_links_are_not_known_every_wait_is_bubble() -> None:
    simulation = simulated(PLANS["zb-v"])
    ran, step = as_a_rank_sees(simulation, 0)
    share = divide(ran, step, LinkTimes())
    assert share.communication == 0
    assert share.bubble == pytest.approx(1 - share.work)


def test_model_flops_are_those_that_torch_counts() -> None:
    model = tiny_model(layers=2, dtype="float32")
    module = model.build((0, model.layers), SoloGroup(), torch.device("cpu"), torch.float32)
    module.initialise(0)
    tokens = torch.zeros(model.sequence_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(tokens, tokens).backward()
    assert model.flops_per_token() * len(tokens) == counter.get_total_flops()


def test_a_slow_rank_is_named_once_it_stays_slow() -> None:
    labels = [f"rank {i} (chip X)" for i in range(4)]
    stragglers = Stragglers(labels, [(0,), (1,), (2, 3)], [1.0, 2.0, 1.0, 1.0])
    even, slow = [1.1, 2.2, 1.1, 1.1], [1.1, 3.6, 1.1, 1.1]
    assert [stragglers.watch(step) for step in [even, slow, even, slow, slow]] == [None] * 5
    sentence = stragglers.watch(slow)
    assert sentence and "rank 1 (chip X) is slow" in sentence and "1.80 times" in sentence
    assert stragglers.watch(slow) is None, "said once"
    assert [stragglers.watch(even)] + [stragglers.watch(slow) for _ in range(PATIENCE - 1)] == (
        [None] * PATIENCE
    )
    assert stragglers.watch(slow), "said again when it is slow again"


def test_a_host_that_does_not_keep_up_names_no_rank() -> None:
    stragglers = Stragglers(["a", "b", "c"], [(0,), (1,), (2,)], [1.0] * 3)
    slow = [1.0, 1.0, 2.0]
    assert all(stragglers.watch(slow, fidelity=0.9) is None for _ in range(2 * PATIENCE))
    assert [stragglers.watch(slow) is None for _ in range(PATIENCE)] == [True, True, False]


@pytest.mark.parametrize("fidelity", [0.94, 0.96])
def test_a_summary_says_when_its_times_say_nothing(
    fidelity: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, 0, 1, quiet=False)
    numbers = dict.fromkeys((f.name for f in fields(Summary)), 1.0)
    texts = {"output": "x", "validation_losses": {}, "pacing_fidelity": fidelity}
    reporter.show(Summary(**{**numbers, **texts}))  # type: ignore[arg-type]
    reporter.close()
    lines = capsys.readouterr().out.splitlines()
    for figure in ("predicted", "bubble"):  # each line of them has the caveat
        [line] = [line for line in lines if figure in line]
        assert ("busy" in line) == (fidelity < 0.95)


@pytest.mark.parametrize("fidelity", [0.94, 0.96])
def test_a_step_that_the_host_delayed_says_so_beside_its_prediction(
    fidelity: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, 0, 1, quiet=False)
    numbers: dict[str, Any] = dict.fromkeys((f.name for f in fields(StepMetrics)), 1.0)
    others = {"step": 1, "validation_losses": {}, "validation_loss": None}
    reporter.step(StepMetrics(**{**numbers, **others, "pacing_fidelity": fidelity}))
    reporter.close()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "predicted" in line]
    assert ("host too busy" in line) == (fidelity < 0.95)


def test_of_ranks_that_wait_for_each_other_all_are_named() -> None:
    labels = [f"rank {i}" for i in range(6)]
    stragglers = Stragglers(labels, [(0,), (1,), (2,), (3,), (4, 5)], [1.0] * 6)
    for _ in range(PATIENCE):
        sentence = stragglers.watch([1.0, 1.0, 1.0, 1.0, 2.0, 1.9])
    assert sentence and "rank 4 or rank 5 is slow" in sentence


def test_work_too_short_to_judge_is_not_judged() -> None:
    stragglers = Stragglers(["a", "b", "c"], [(0,), (1,), (2,)], [1e-6] * 3)
    assert all(stragglers.watch([1e-3, 1e-3, 1e-2]) is None for _ in range(2 * PATIENCE))


def test_all_slow_together_is_no_straggler() -> None:
    stragglers = Stragglers(["a", "b"], [(0,), (1,)], [1.0, 1.0])
    assert all(stragglers.watch([3.0, 3.1]) is None for _ in range(2 * PATIENCE))


def test_actions_of_machines_that_started_days_apart_are_on_one_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begins_s() -> float:
        clock = HostClock()
        gauges = Gauges(PLANS["1f1b"], None, 0, [""], Device(torch.device("cpu"), "gloo", clock))
        marks = [(Action(Kind.F, 0), clock.mark(), clock.mark())]
        (span,) = gauges.spans(StepResult(0.0, 0.0, False, 1.0, (0, 0, 0), marks, 0, HostWaits()))
        return span.start_s

    here_s, day_s, now_s = begins_s(), 86400, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + day_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int((now_s + day_s) * 1e9))
    assert begins_s() == pytest.approx(here_s, abs=day_s / 2)


class Event:
    """An event as torch has it; the time to another is a float32 of milliseconds, not negative."""

    now_s = 0.0

    def __init__(self, *arguments: object, **settings: object) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = Event.now_s

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return max(0.0, float(np.float32((other.at_s - self.at_s) * 1e3)))


def test_times_of_events_stay_fine_for_as_long_as_a_run_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each mark is asked for twice, as a step's metrics and its trace do, the last one first."""
    monkeypatch.setattr(Event, "now_s", 0.0)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, EventClock)
    start_s = clock.seconds(clock.mark())
    for begin_s in range(0, 24 * 3600, 7):
        marks = []
        for Event.now_s in (begin_s, begin_s + 0.0123):
            marks.append(clock.mark())
        for _ in range(2):
            ended_s, began_s = (clock.seconds(mark) for mark in reversed(marks))
            assert ended_s - began_s == pytest.approx(0.0123, abs=2e-5)
            assert began_s - start_s == pytest.approx(begin_s, abs=1e-2)
