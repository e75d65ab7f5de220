"""Which steps may change the parameters."""

from __future__ import annotations

import math

import pytest

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.runtime.step.guard import DivergedError, Guard
from heteropp.state.slices.scalars import Scalars

USUAL = [(2.0 + 0.01 * step, 1.0 + 0.02 * (step % 5)) for step in range(20)]


def after_usual_steps(**settings: object) -> Guard:
    guard = Guard(Hyperparameters(spike_factor=3, **settings))  # type: ignore[arg-type]
    assert all(guard.accepts(*step) and guard.take_warning() is None for step in USUAL)
    return guard


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("loss", "norm", "named"), [(2.2, 3.5, "gradient norm"), (7, 1, "loss")])
def test_what_is_far_above_the_median_is_warned_of(
    skip: bool, loss: float, norm: float, named: str
) -> None:
    guard = after_usual_steps(skip_spikes=skip)
    assert guard.accepts(loss, norm) is not skip
    warning = guard.take_warning()
    assert warning is not None
    assert warning.startswith(f"the {named} is {max(loss, norm)}, ")
    assert warning.endswith(": skipped") is skip
    assert guard.take_warning() is None


def test_the_first_steps_are_never_unusual() -> None:
    guard = Guard(Hyperparameters(spike_factor=3, skip_spikes=True))
    assert all(guard.accepts(*step) for step in [(2.0, 1.0), (90.0, 50.0), (2.0, 1.0)])


@pytest.mark.parametrize("what", [(math.nan, 1.0), (2.0, math.inf), (math.inf, math.nan)])
def test_too_many_skipped_steps_in_a_row_end_the_run(what: tuple[float, float]) -> None:
    guard = after_usual_steps(most_skipped=3)
    for _ in range(2):  # a good step begins the count anew
        assert not guard.accepts(*what)
        assert not guard.accepts(*what)
        assert guard.accepts(2.0, 1.0)
    guard.accepts(*what)
    guard.accepts(*what)
    with pytest.raises(DivergedError, match="3 steps in a row went wrong; in the last the "):
        guard.accepts(*what)


def test_a_step_with_nothing_to_learn_is_skipped_and_nothing_went_wrong() -> None:
    guard = after_usual_steps(most_skipped=1)
    assert guard.judging(5) == guard.accepts
    for _ in range(3):
        assert not guard.judging(0)(0.0, 0.0)
        assert guard.take_warning() == "none of the step's tokens is to be learnt: skipped"
    assert guard.accepts(2.0, 1.0)


def test_a_resumed_guard_judges_as_one_that_went_on() -> None:
    one = after_usual_steps(skip_spikes=True)
    one.accepts(math.nan, 1.0)
    other = Guard(one.hyperparameters)
    other.restore(
        Scalars(
            losses=tuple(one.losses),
            gradient_norms=tuple(one.gradient_norms),
            skipped_in_a_row=one.skipped_in_a_row,
        )
    )
    for step in [(6.2, 1.0), (6.4, 1.0), (2.0, 3.1), (2.0, 3.2), (math.nan, 1.0)]:
        assert one.accepts(*step) == other.accepts(*step)
        assert one.take_warning() == other.take_warning()
