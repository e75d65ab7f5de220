"""Elastic training while ranks are killed, paused, told to go and added: tools/chaos."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import chaos
import pytest
from chaos_runs import strikes
from chaos_runs.events import damage
from chaos_runs.load import load
from chaos_runs.scene import DEADLINE_S, Curve, draw
from chaos_runs.verdict import Change, kept_steps, missing, worst_difference
from lab import lab
from recovery_ranks import Ranks, keep
from training_run import make_plan, tiny_model

from heteropp.state.recovery.snapshots import Cadence

MACHINES = 3
LOSSES = [5.5, 5.25, 5.0]


def lines(*losses: float | None) -> list[dict]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


def test_a_loss_off_the_curve_is_seen() -> None:
    assert worst_difference(lines(5.5, 5.25), LOSSES) == 0
    assert worst_difference(lines(5.5, 5.25 * (1 + 1e-6)), LOSSES) == pytest.approx(1e-6)
    assert worst_difference(lines(5.5, None), LOSSES) == float("inf")
    assert worst_difference(lines(5.5, 5.25, 5.0, 4.75), LOSSES) == float("inf")


def test_a_seed_draws_the_same_again(tmp_path: Path) -> None:
    cut = spread = 0
    for seed in range(100):
        scene = draw(seed)
        assert draw(seed) == scene and scene.events
        (folder := tmp_path / str(seed)).mkdir()
        chips, _, plan = chaos.write_files(scene, folder)
        assert plan.world_size == sum(chips.values()) >= 4
        cut += plan.has_context_parallelism
        spread += plan.has_expert_parallelism
    assert cut > 10 and spread > 10


@pytest.mark.parametrize(
    ("cause", "nodes"),
    [
        ("", 1),
        ("a-0/1, a-0/2 will go", 1),
        ("b-1/0 came; b-0/1 did not answer in time; b-0/0 came", 2),
        ("a-0/0 was killed by SIGKILL; the switch was not done in time", 1),
    ],
)
def test_a_change_answers_to_the_nodes_that_its_cause_names(cause: str, nodes: int) -> None:
    change = Change("recover", (), 0, 0, 0.0, 0.0, 0.0, Path(), cause)
    assert change.disturbed_nodes == nodes


def test_the_load_computes_and_ends() -> None:
    with load(1) as (busy,):
        used = f"/proc/{busy.pid}/stat"
        while int(Path(used).read_text().split()[13]) < 5:  # clock ticks of its own
            assert busy.poll() is None
    assert busy.poll() is not None


Prepared = Callable[[Curve], tuple[Path, chaos.Curves]]  # the text, and the undisturbed losses


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Runs of one curve, whichever worker has them, share what they are held against, and traces:
    on a busy machine a first search of parts, or of experts over ranks, takes tens of seconds.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    return cache(lambda curve: prepare_once(root / f"chaos-{curve.model.name}", curve))


def prepare_once(folder: Path, curve: Curve) -> tuple[Path, chaos.Curves]:
    folder.mkdir(exist_ok=True)
    known = folder / "losses.json"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if known.exists():
            return folder / "text", json.loads(known.read_text())
        text, losses = chaos.prepare(folder, [curve])
        known.write_text(json.dumps(losses))
    return text, losses


# of those that CI runs, 0 cuts sequences over chips; 2 and others have experts lie over them
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(n, marks=pytest.mark.long if n in (0, 5) else pytest.mark.exhaustive)
        for n in range(50)
    ],
)
def test_a_disturbed_run_ends_as_it_must(seed: int, prepared: Prepared, tmp_path: Path) -> None:
    text, losses = prepared(draw(seed).curve)
    folder = tmp_path / "run"
    verdict = chaos.run(seed, folder, text, losses, DEADLINE_S)
    assert not verdict.faults, chaos.account(verdict, folder)
    assert verdict.happened


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(5, id="kill-1"),
        pytest.param(11, id="kill-the-store"),
        pytest.param(6, id="stop-1"),
        pytest.param(10, id="cut-off-1-and-2"),
    ],
)
def test_a_run_over_machines_ends_as_it_must(seed: int, tmp_path: Path) -> None:
    with lab(1, tmp_path):  # or else it is skipped
        pass
    scene = strikes.draw(seed, MACHINES, DEADLINE_S)
    text, losses = chaos.prepare(tmp_path, [scene.job.curve])  # where all of its machines see it
    folder = tmp_path / "run"
    verdict = chaos.run_over_machines(seed, folder, text, losses, DEADLINE_S, MACHINES)
    assert not verdict.faults, chaos.account(verdict, folder)
    assert verdict.happened


@pytest.mark.long
def test_copies_that_are_whole_are_told_from_others(tmp_path: Path) -> None:
    """What decides whether a run that lost a layer was honest."""
    model = tiny_model()
    plan = make_plan(model, (2, 2), (1, 2), (2, 1), (False, False))
    nodes = ["a-0", "a-0", "b-0", "c-0"]
    ranks = Ranks(tmp_path)
    try:
        ranks.run(plan, nodes, keep, [3], Cadence(memory=1))
    finally:
        ranks.close()

    def lacking(*names: str) -> list[str]:
        held = kept_steps(tmp_path / "memory" / name for name in names)
        return missing(model, *held.values())

    assert lacking("a-0", "b-0", "c-0") == []
    of_second_stage = ("layers.2.", "layers.3.", "norm.", "head.")
    assert all(name.startswith(of_second_stage) for name in lacking("a-0", "b-0"))
    assert lacking("a-0", "b-0")  # c-0 has the other half of the optimizer's state
    for file in (tmp_path / "memory" / "a-0").glob("*/layers.1.*"):
        assert damage(file, 0.7)
    damaged = lacking("a-0", "b-0", "c-0")
    assert damaged and all(name.startswith("layers.1.") for name in damaged)
