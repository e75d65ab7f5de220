"""What is expected of plans that were made from a profile is what the profile measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model
from commands import Ended, run_command
from test_profile import made_up
from training_run import refusal

from heteropp.cli import search, simulate
from heteropp.description.chips import load_chip
from heteropp.description.plan import Plan, read_plan
from heteropp.description.profile import write_profile
from heteropp.simulator.expectation import expected_step

KINDS = [
    (1, False, False),
    (2, False, False),
    (4, False, False),
    (1, True, False),
    (1, False, True),
]
MICRO_BATCHES, LAYER_S = 2, 10.0


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    """A plan for one chip: a layer takes ten seconds there, of which its file knows nothing."""
    text = load_chip("b-mini").path.read_text().replace("tp_limit", "tp_limit = 1\n# tp_limit")
    (tmp_path / "x").with_suffix(".toml").write_text(text)
    cluster, model = write_cluster(tmp_path / "cluster.toml", ("x.toml", 1)), tiny_model()
    write_model(tmp_path / "model.toml", model)
    profile = made_up({(layers, *ends): LAYER_S * layers for layers, *ends in KINDS}, "x.toml")
    write_profile(profile, tmp_path / "profile.json")
    options = "--planner", "exact", "--global-batch", MICRO_BATCHES, "--profile"
    files = "--cluster", cluster, "--model", tmp_path / "model.toml", "-o", tmp_path / "plan.json"
    done = run_command(search.app, [*files, *options, tmp_path / "profile.json"])
    assert done.exit_code == 0, done.stderr
    return read_plan(tmp_path / "plan.json")


def simulated(folder: Path, *more: object) -> Ended:
    files = "--plan", folder / "plan.json", "--cluster", folder / "cluster.toml"
    return run_command(simulate.app, [*files, "--json", *more])


def test_a_profile_is_simulated_where_it_is_given(tmp_path: Path, planned: Plan) -> None:
    done = simulated(tmp_path, "--profile", tmp_path / "profile.json")
    assert (done.exit_code, done.stderr) == (0, "")
    by_profile_s = json.loads(done.stdout)["step_s"]
    assert planned.prediction is not None
    assert by_profile_s == pytest.approx(planned.prediction.step_s)
    assert by_profile_s > MICRO_BATCHES * LAYER_S * planned.model.layers
    expected = expected_step(planned, tmp_path / "cluster.toml", tmp_path / "profile.json")
    assert expected is not None and expected.step_s == pytest.approx(by_profile_s)


def test_a_profile_that_is_not_given_is_named(tmp_path: Path, planned: Plan) -> None:
    done = simulated(tmp_path)
    assert done.exit_code == 0 and json.loads(done.stdout)["step_s"] < LAYER_S
    (sentence,) = done.stderr.splitlines()
    assert sentence == (
        f"the plan was made from profile {planned.profile}; without --profile, the chips' files "
        "say how fast they are"
    )


def test_a_profile_of_another_model(tmp_path: Path, planned: Plan) -> None:
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"intermediate": ', '"intermediate": 1'))
    done = simulated(tmp_path, "--profile", tmp_path / "profile.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "profile.json is of a model with intermediate " in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--device", "cpu"), "--profile says how fast chips are; --device cpu has none"),
        (("--elastic",), "--profile is not for --elastic: "),
    ],
)
def test_training_that_has_no_use_for_it(
    tmp_path: Path, planned: Plan, more: tuple[str, ...], said: str
) -> None:
    assert said in refusal(tmp_path, "--profile", str(tmp_path / "profile.json"), *more)
