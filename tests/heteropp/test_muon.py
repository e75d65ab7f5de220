"""Muon on every layout against torch.optim.Muon, and AdamW beside it, in one process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import cluster_of, write_model
from elastic_run import NODE, Elastic
from elastic_run import SETTINGS as ELASTIC_SETTINGS
from layouts import mixed_chips, plan_of, scheduled, two_pipelines
from parity import Ranks, Trained
from plain_llama import decaying
from sampled import sampled
from test_own_model import own_model
from training_run import Training, refusal, tiny_model

import heteropp
from ditorch.chips import load_chip
from heteropp.description.plan import Plan, PlanError, validate
from heteropp.search.judge import ask
from heteropp.search.planner import Request
from heteropp.state.checkpoint.manifest import read as read_checkpoint

MODEL = tiny_model(layers=8, dtype="float64")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def muon_and_adamw(model: Any, module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for all else."""
    decays = {id(p) for p in decaying(model, module)[0]["params"]}
    matrices, others = [], []
    for name, parameter in module.named_parameters():
        group: dict[str, Any] = {"params": [parameter]}
        group["weight_decay"] = 0.1 if id(parameter) in decays else 0.0
        group["factor"] = 2.0 if name.startswith("layers.1.") else 1.0
        inside = name.startswith("layers.") and parameter.dim() == 2
        (matrices if inside else others).append(group)
    return [
        torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-8),
    ]


SETTINGS = {"optimizer": "muon", "groups": ("layers.1.*:learning_rate=2x",)}


def check(got: Trained, plain: Trained, tolerance: float) -> None:
    assert got.losses == pytest.approx(plain.losses, rel=tolerance)
    assert got.norms == pytest.approx(plain.norms, rel=tolerance)
    assert got.parameters.keys() == plain.parameters.keys()
    for name, expected in plain.parameters.items():
        error = (got.parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name}: {error:.3g}"


PLANS: dict[str, Callable[[Any], Plan]] = {
    "one rank": lambda m: plan_of(m, (8,), (1,), (1,)),
    "ZeRO 0, tp 2 to 1": lambda m: plan_of(m, (3, 5), (1, 2), (2, 1), zero_stage=0),
    "ZeRO 1, dp 4 and tp 2": lambda m: plan_of(m, (6, 2), (4, 1), (1, 2)),
    "ZeRO 2, both": lambda m: plan_of(m, (8,), (2,), (2,), zero_stage=2, sequence_parallel=True),
    "ZeRO 2, zb-v": lambda m: scheduled(
        plan_of(m, (4, 4), (2, 1), (1, 2), zero_stage=2), "zb-v", 2
    ),
    "offload": lambda m: scheduled(plan_of(m, (4, 4), (2, 1), (1, 2), offload=True), "gpipe", 2),
    "two pipelines": two_pipelines,
    "mixed chips": mixed_chips,
}
EVERYDAY = ("one rank", "ZeRO 2, both")


@pytest.mark.parametrize(
    "name", [*EVERYDAY, *sampled((name for name in PLANS if name not in EVERYDAY), 6)]
)
def test_it_trains_as_torch_s_muon_does(ranks: Ranks, name: str) -> None:
    plan = replace(PLANS[name](MODEL), optimizer="muon")
    check(
        ranks.train(plan, settings=SETTINGS),
        ranks.plainly(plan, optimizers_of=muon_and_adamw),
        1e-11,
    )


@pytest.mark.long
def test_packed_matrices_are_one(ranks: Ranks) -> None:
    """An own model's queries, keys and values are one parameter, which tp cuts piece by piece."""
    plan = replace(plan_of(own_model(), (3, 5), (2, 1), (1, 2)), optimizer="muon")
    check(
        ranks.train(plan, settings=SETTINGS),
        ranks.plainly(plan, optimizers_of=muon_and_adamw),
        1e-11,
    )


def test_a_matrix_without_weight_decay_is_muon_s_alone(ranks: Ranks) -> None:
    """A model of one's own may except matrices of its blocks from weight decay."""
    model = own_model()
    parts = tuple(
        replace(
            part,
            parameters=tuple(
                replace(p, decays=p.decays and p.name != "up.weight") for p in part.parameters
            ),
        )
        for part in model.parts
    )
    plan = replace(
        plan_of(replace(model, parts=parts), (8,), (2,), (1,), zero_stage=2), optimizer="muon"
    )
    check(
        ranks.train(plan, settings=SETTINGS),
        ranks.plainly(plan, optimizers_of=muon_and_adamw),
        1e-11,
    )


@pytest.mark.exhaustive
def test_float32_and_bfloat16_learn_as_float64_does(ranks: Ranks) -> None:
    """They agree to the rounding of the 16 bits in which matrices are made orthogonal."""
    plan = plan_of(replace(MODEL, dtype="float32"), (3, 5), (2, 1), (1, 2))
    plan = replace(plan, optimizer="muon")
    got, plain = (
        ranks.train(plan, settings=SETTINGS),
        ranks.plainly(plan, optimizers_of=muon_and_adamw),
    )
    check(got, plain, 1e-4)
    narrow = replace(plan, model=replace(plan.model, dtype="bfloat16"))
    wide = ranks.train(plan, settings=SETTINGS | {"learning_rate": 1e-3})
    assert ranks.train(narrow, settings=SETTINGS).losses == pytest.approx(wide.losses, rel=1e-3)


@pytest.mark.long
def test_a_run_goes_on_under_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint has no squares of matrices' gradients, and needs none under any plan."""
    plan = replace(PLANS["ZeRO 1, dp 4 and tp 2"](MODEL), optimizer="muon")
    other = replace(plan_of(MODEL, (2, 6), (1, 2), (2, 1), zero_stage=2), optimizer="muon")
    whole = ranks.train(plan, 5, settings=SETTINGS)
    ranks.train(plan, 3, tmp_path, settings=SETTINGS)
    (folder,) = tmp_path.glob("step-*")
    stored = b"".join(file.read_bytes() for file in folder.glob("layers.3.*.safetensors"))
    assert b"average/layers.3.mlp.down.weight" in stored
    assert b"average_square/layers.3.mlp.down" not in stored
    assert b"average_square/layers.3.mlp_norm.weight" in stored
    resumed = ranks.train(other, 5, tmp_path, settings=SETTINGS)
    assert resumed.losses == pytest.approx(whole.losses[3:], rel=1e-11)


@pytest.mark.exhaustive
def test_an_elastic_run_goes_on_after_members_leave_and_die(tmp_path: Path) -> None:
    """Its state is moved to another plan, and then recovered from snapshots."""
    model, muon = tiny_model(dtype="float64"), ("--optimizer", "muon")
    one = plan_of(model, (4,), (1,), (1,))
    (tmp_path / "whole").mkdir()
    whole = Training(
        tmp_path / "whole", one, *ELASTIC_SETTINGS, *muon, "--steps", "200", device="cpu"
    )
    expected = whole.finish().losses
    plan = plan_of(model, (2, 1, 1), (1, 1, 1), (2, 1, 2))
    (tmp_path / "elastic").mkdir()
    remote = ("--remote", str(tmp_path / "remote"), "--keep-remote-every", "2")
    training = Elastic(tmp_path / "elastic", plan, *muon, *remote, "--notice", "250")
    try:
        training.until(3)
        training.send(signal.SIGTERM, f"{NODE}-0/1")
        training.until_generation(2)
        training.until(training.changes[-1]["step"] + 3)
        training.send(signal.SIGKILL, sorted(training.members)[-1])
        training.until_generation(3)
        training.until(training.changes[-1]["step"] + 3)
        training.process.send_signal(signal.SIGTERM)
        training.wait(250)
    finally:
        training.process.kill()
    assert [change["start"] for change in training.changes] == ["initial", "switch", "recover"]
    assert "muon" in (training.output / "generations" / "0003" / "plan.json").read_text()
    found = training.losses[: len(expected)]
    assert found == pytest.approx(expected[: len(found)], rel=1e-9)


@pytest.mark.exhaustive
def test_the_command_searches_trains_and_resumes_for_muon(tmp_path: Path, capsys: Any) -> None:
    """Emulated chips train; the optimizer is the plan's, and a resume keeps it."""
    model = tiny_model()
    write_model(tmp_path / "model.toml", model)
    text = 'name = "two"\n[[nodes]]\nchip = "a-mini"\nchips = 2\n'
    (tmp_path / "two.toml").write_text(text)
    plans = {
        name: heteropp.plan(
            *(tmp_path / "model.toml", tmp_path / "two.toml"),
            global_batch=4,
            optimizer=name,
            planner="heteroauto",  # which looks at fewer plans: each kind of stage is traced
        )
        for name in ("adamw", "muon")
    }
    times = {name: plan.prediction.step_s for name, plan in plans.items() if plan.prediction}
    assert times["muon"] > times["adamw"]
    assert plans["muon"].optimizer == "muon"
    plan = plan_of(model, (4,), (2,), (1,))
    Training(tmp_path, plan, "--optimizer", "muon", "--steps", "2").finish()
    manifest = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-000002").manifest
    assert manifest.hyperparameters.optimizer == "muon"
    resumed = Training(tmp_path, plan, "--resume", "--steps", "3").finish()  # plan says adamw
    assert len(resumed.losses) == 3
    assert "was made with optimizer muon, not adamw" in refusal(
        tmp_path, "--resume", "--steps", "4", "--optimizer", "adamw"
    )
    assert "optimizer is sgd; expected one of adamw, muon" in refusal(
        tmp_path, "--optimizer", "sgd", "--output", str(tmp_path / "other")
    )


def test_copies_on_unlike_chips_are_refused() -> None:
    for plan in (
        replace(mixed_chips(MODEL), zero_stage=0),
        _elsewhere(two_pipelines(MODEL)),
    ):
        validate(plan)
        with pytest.raises(PlanError, match="layer 0 is held by chips another"):
            validate(replace(plan, optimizer="muon"))
    validate(replace(mixed_chips(MODEL), optimizer="muon"))


def test_a_planner_s_plans_that_cannot_run_take_no_other_away() -> None:
    """Autohet's runners-up have layers on chips of two types."""
    cluster = cluster_of(("a", load_chip("a-mini"), 2), ("b", load_chip("b-mini"), 2))
    request = Request(cluster=cluster, model=MODEL, global_batch=2, optimizer="muon")
    verdict = ask("autohet", request)
    assert verdict.best.plan == ask("autohet", request, simulated=1).best.plan


def _elsewhere(plan: Plan) -> Plan:
    """Its second pipeline is on chips of another type."""
    one, other = plan.pipelines
    stages = tuple(
        replace(s, replicas=tuple(replace(r, chip="another.toml") for r in s.replicas))
        for s in other.stages
    )
    return replace(plan, pipelines=(one, replace(other, stages=stages)))
