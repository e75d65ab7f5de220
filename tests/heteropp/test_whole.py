"""Which backwards the host runs whole; that they add up to the same is test_parity's."""

from __future__ import annotations

from training_run import make_plan, tiny_model

from heteropp.runtime.step.whole import STEPS, WholeBackwards
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.stage_actions import actions

MICRO_BATCHES = 4


def last_stage() -> list[Action]:
    plan = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False))
    return actions("1f1b", plan.pipelines[0], 1)


def a_step(table: list[Action], wait: float) -> list[tuple[Action, float, float]]:
    """Marks of a step whose every receive takes `wait` and everything else 1."""
    marks, clock = [], 0.0
    for action in table:
        begin = clock
        clock += wait if action.kind == Kind.RECV_ACTIVATION else 1
        marks.append((action, begin, clock))
    return marks


def test_a_busy_stage_halves_only_its_last_backward() -> None:
    whole = WholeBackwards(last_stage())
    for _ in range(2 * STEPS):
        whole.learn(a_step(last_stage(), wait=0.0))
        assert whole.backwards == {(0, i) for i in range(MICRO_BATCHES - 1)}


def test_a_stage_that_waits_sends_gradients_first() -> None:
    whole = WholeBackwards(last_stage())
    for step in range(STEPS):
        assert (0, 0) in whole, step
        whole.learn(a_step(last_stage(), wait=1.0))
    assert (0, 0) not in whole


def test_the_first_receive_of_a_step_does_not_count() -> None:
    """A wait at the first receive is left out, for the pipeline is filling then."""
    whole = WholeBackwards(last_stage())
    first, *others = a_step(last_stage(), wait=0.0)
    for _ in range(2 * STEPS):
        whole.learn([(first[0], -2.0, 0.0), *others])
    assert (0, 0) in whole
