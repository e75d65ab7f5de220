"""The Python API: what it refuses, and a run that it goes on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from training_run import make_plan, tiny_model, write_text

import heteropp
from heteropp.api.training.options import TrainingOptions
from heteropp.cli.train import train

PLAN = make_plan(tiny_model(), [2, 2], dp=[1, 1], tp=[1, 1], recompute=[False, False])


@pytest.fixture(scope="module")
def plan() -> heteropp.Plan:
    return heteropp.plan("quickstart", "quickstart", global_batch=8, planner="uniform")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"global_batch": "16"}, "global_batch is '16'; expected a valid integer"),
        ({"global_batch": 0}, "global_batch is 0; expected greater than or equal to 1"),
        ({"global_batch": 8, "zero_stage": 5}, "zero_stage is 5; expected less than or equal to 2"),
        ({"global_batch": 8, "schedule": "zb"}, "schedule is 'zb'; expected '1f1b', "),
        ({"global_batch": 8, "sequence_length": 1.5}, "sequence_length is 1.5; expected "),
        ({"planner": "exact", "uneven_layers": "yes"}, "uneven_layers is 'yes'; expected "),
        ({"global_batch": 8, "planner": "best"}, "planner is best; expected one of "),
        ({"planner": "exact", "budget_s": 1.0}, "a budget is for planner auto; exact searches "),
        ({"planner": "uniform", "uneven_layers": True}, "uneven layers are for planner exact; "),
        ({"stage_degrees": True}, "stage degrees are for planner exact; auto takes no such "),
    ],
)
def test_a_request_out_of_bounds_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(heteropp.InputError, match=sentence):
        heteropp.plan("quickstart", "quickstart", **{"global_batch": 8, **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"noise": -1}, "noise is -1; expected greater than or equal to 0"),
        ({"noise": float("nan")}, "noise is nan; expected "),
        ({"slack": 0.5}, "slack is 0.5; expected a valid integer"),
        ({"slowdown": {0: 0}}, r"slowdown\[0\] is 0; expected greater than 0"),
        ({"slowdown": {99: 2.0}}, "slowdown names rank 99; the plan has ranks 0 to "),
        ({"seed": "one"}, "seed is 'one'; expected a valid integer"),
    ],
)
def test_a_simulation_out_of_bounds_is_refused(
    plan: heteropp.Plan, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(heteropp.InputError, match=sentence):
        heteropp.simulate(plan, "quickstart", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 1.5}, "steps is 1.5; expected a valid integer"),
        ({"steps": 0}, "steps is 0; expected greater than or equal to 1"),
        ({"deadline": 1}, "deadline is 1; expected greater than or equal to 5"),
        ({"data": 5}, "data is 5; expected "),
        ({"resume": "yes"}, "resume is 'yes'; expected a valid boolean"),
        ({"stepz": 4}, "train has no option stepz; expected one of plan, "),
    ],
)
def test_a_training_out_of_bounds_is_refused(
    plan: heteropp.Plan, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(heteropp.InputError, match=sentence):
        heteropp.train(plan, "quickstart", output=tmp_path / "run", **options)


def test_the_command_and_the_api_have_the_same_bounds() -> None:
    options = get_type_hints(train, include_extras=True)
    fields = get_type_hints(TrainingOptions, include_extras=True)
    for name, hint in fields.items():
        kinds = (hint, *get_args(hint))  # with None, or alone
        bounds = [
            bound.ge
            for kind in kinds
            for bound in getattr(kind, "__metadata__", ())
            if hasattr(bound, "ge")
        ]
        assert bounds == [o.min for o in options[name].__metadata__ if o.min is not None], name


@pytest.mark.long
def test_a_run_goes_on_with_what_it_began_with(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    output = tmp_path / "run"
    began = {"data": tmp_path / "text", "device": "cpu", "learning_rate": 1e-2}
    heteropp.train(PLAN, output=output, steps=2, decay_steps=4, **began)
    heteropp.train(output=output, resume=True, steps=4)
    whole = tmp_path / "whole"
    heteropp.train(PLAN, output=whole, steps=4, decay_steps=4, **began)
    texts = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (output, whole)]
    losses = [[line.split('"loss":')[1].split(",")[0] for line in lines] for lines in texts]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def asked(**options: Any) -> heteropp.Plan:
    return heteropp.plan("quickstart", "quickstart", global_batch=8, **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: heteropp.plan("quickstart", None, global_batch=8), "cluster is None; expected"),
        (lambda p: heteropp.plan(print, "quickstart", global_batch=8), "print is no function at"),
        (lambda p: heteropp.plan("quickstart", "quickstart", global_batch=8, profile=5), "profile"),
        (
            lambda p: heteropp.plan("quickstart", "quickstart", global_batch=8, zero_stage=True),
            "ze",
        ),
        (lambda p: heteropp.simulate(5, "quickstart"), "plan is 5; expected a path or a "),
        (lambda p: heteropp.simulate(p, "quickstart", slowdown={"0": 2.0}), "names rank '0'"),
        (lambda p: heteropp.simulate(p, "quickstart", slowdown=5), "slowdown is 5; expected "),
        (lambda p: heteropp.train(p, output=5), "output is 5; expected "),
        (lambda p: heteropp.train("a\0b"), r"'a\\x00b' cannot be read: embedded null byte"),
        (lambda p: heteropp.train(p, data="a\udcff", device="tpu"), "--device is tpu"),
    ],
)
def test_what_is_no_plan_and_no_cluster_is_refused(
    plan: heteropp.Plan, call: Callable[[Any], Any], sentence: str
) -> None:
    with pytest.raises((heteropp.InputError, heteropp.FileError), match=sentence):
        call(plan)
