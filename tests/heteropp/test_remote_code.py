"""Code in a Hugging Face folder runs where it is trusted, and as it was when it was planned."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import typer
from commands import Ended, run_command
from elastic_run import NODE, Elastic, Undisturbed, assert_as_undisturbed, wait_for
from layouts import plan_of
from remote_family import MODELING, write_scaled
from training_run import Training, refusal, start_with, wait, write_text

import heteropp
from heteropp.cli import export, models, search, simulate
from heteropp.description.model import read_model
from heteropp.description.plan import Plan, read_plan
from heteropp.models.hugging_face import check as comparing

TRUST = "--trust-remote-code"
UNTRUSTED = f"(auto_map), which is not run without {TRUST} (trust_remote_code=True)"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(app: typer.Typer, *arguments: object) -> Ended:
    return run_command(app, [str(each) for each in arguments])


def passed(app: typer.Typer, *arguments: object) -> str:
    result = run(app, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(app: typer.Typer, *arguments: object) -> str:
    result = run(app, *arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def plan_for(folder: Path, tp: tuple[int, ...] = (2, 1)) -> Plan:
    model: Any = read_model(folder, 32, trust_remote_code=True)
    return plan_of(model, (3, 1), (1, 2), tp)


def test_nothing_runs_without_permission(tmp_path: Path) -> None:
    """Not of the folder, and not of a plan of it, in commands or in the API."""
    folder, plan = write_scaled(tmp_path / "scaled", weights=False), tmp_path / "plan.json"
    trap = tmp_path / "ran"
    with (folder / MODELING).open("a") as file:
        file.write(f"\nopen({str(trap)!r}, 'w').close()\n")
    request = "--cluster", "quickstart", "--model", folder, "--global-batch", 8
    request += "--planner", "exact"  # the quickest
    simulated = "--plan", plan, "--cluster", "quickstart"
    assert f"{folder} {UNTRUSTED}" in refused(models.app, "check", folder)
    assert UNTRUSTED in refused(search.app, *request)
    with pytest.raises(heteropp.FileError, match="trust_remote_code=True"):
        heteropp.plan(folder, "quickstart", global_batch=8)
    assert not trap.exists()
    passed(search.app, *request, "--output", plan, TRUST)
    assert trap.exists()
    shutil.copy(plan, tmp_path / "again.json")
    passed(search.app, *request, "--output", plan, TRUST)
    assert plan.read_bytes() == (tmp_path / "again.json").read_bytes()
    content = read_plan(plan)
    # this process may run the code by now, and yet whoever asks has to say so
    assert UNTRUSTED in refused(simulate.app, *simulated)
    with pytest.raises(heteropp.InputError, match="trust_remote_code=True"):
        heteropp.simulate(content, "quickstart")
    with pytest.raises(heteropp.InputError, match="trust_remote_code=True"):
        heteropp.plan(content.model, "quickstart", global_batch=8)
    with pytest.raises(heteropp.InputError, match="trust_remote_code=True"):
        heteropp.train(content, "quickstart", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    passed(simulate.app, *simulated, TRUST)
    assert heteropp.simulate(content, "quickstart", trust_remote_code=True).step_s > 0
    # a process of its own has not run it, and builds nothing of a plan that it was not told to
    trap.unlink()
    process = forks.start(
        ["-m", "heteropp.cli.simulate", *map(str, simulated)], {"XDG_CACHE_HOME": str(tmp_path)}
    )
    assert UNTRUSTED in wait(process, 60)[2]
    assert not trap.exists()


def test_a_family_passes_once_for_each_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_scaled(tmp_path / "scaled", weights=False)
    said = passed(models.app, "check", folder, TRUST)
    assert "family scaled, dense" in said and "tp 2: as transformers" in said
    assert "tp 2, sequence parallel: no, up_proj, which is cut by features, is in no module" in said

    def never(*_: object) -> None:
        raise AssertionError("the family has passed")

    monkeypatch.setattr(comparing, "check", never)
    assert passed(models.app, "check", folder, TRUST) == said
    with (folder / MODELING).open("a") as file:
        file.write("# other code\n")
    with pytest.raises(AssertionError, match="has passed"):
        run(models.app, "check", folder, TRUST)


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        values = json.loads(file.read_text())
        values["auto_map"] = {**values["auto_map"], **changes.pop("auto_map", {})}
        file.write_text(json.dumps({**values, **changes}))

    return change


def _code(before: str, after: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / MODELING
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after, 1))

    return change


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "elsewhere": (
        _config(auto_map={"AutoModelForCausalLM": "somebody/theirs--modeling.Model"}),
        "AutoModelForCausalLM 'somebody/theirs--modeling.Model', which is of another repository",
    ),
    "no config": (_config(auto_map={"AutoConfig": None}), "auto_map has no AutoConfig"),
    "no such file": (
        _config(auto_map={"AutoConfig": "../scaled.ScaledConfig"}),
        "AutoConfig '../scaled.ScaledConfig'; expected FILE.CLASS, of a Python file in",
    ),
    "no such class": (
        _config(auto_map={"AutoConfig": "configuration_scaled.Another"}),
        "cannot be imported: AttributeError",
    ),
    "no package": (_code("import torch\n", "import torch, no_such\n"), "no_such"),
    "exits": (_code("import torch\n", "import torch\nraise SystemExit(3)\n"), "SystemExit: 3"),
    "dropout": (_config(attention_dropout=0.1), "attention_dropout is 0.1; expected 0"),
    "no layers": (
        _code("self.layers =", "self.blocks ="),
        "has no layers between a table and a head",
    ),
    "carries more": (
        _code("inputs_embeds\n        for", "inputs_embeds * 2\n        for"),
        "changes the activations that enter between its layers",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_code_is_one_sentence(tmp_path: Path, kind: str) -> None:
    folder = write_scaled(tmp_path / "scaled", weights=False)
    damage, expected = BAD[kind]
    damage(folder)
    assert expected in refused(models.app, "check", folder, TRUST)


def test_changed_code_is_named(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path / "scaled", weights=False)
    plan, place = plan_for(folder), tmp_path / "plan.json"
    heteropp.write_plan(plan, place)
    write_text(tmp_path / "text")
    given = "--device", "cpu", "--steps", "1", TRUST

    def both() -> str:
        simulated = "--plan", place, "--cluster", "quickstart"
        said = refused(simulate.app, *simulated, TRUST)
        assert said == refusal(tmp_path, *given)
        return said

    original = (folder / MODELING).read_text()
    _code("* self.weight", "* self.weight * 1.0")(folder)
    assert f"{folder / MODELING} is not what it was when the model was planned" in both()
    (folder / MODELING).unlink()
    assert f"{folder / MODELING} is missing, which the model was planned with" in both()
    (folder / MODELING).write_text(original)
    (folder / "more.py").touch()
    assert f"{folder / 'more.py'} was not there when the model was planned" in both()
    (folder / "more.py").unlink()
    other = write_scaled(tmp_path / "other", weights=False)
    _code("* self.weight", "* self.weight * 1.0")(other)
    said = refusal(tmp_path, *given, "--from", str(other))
    assert f"{other / MODELING} is not what it was when the model was planned" in said
    assert not (tmp_path / "run" / "starts").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_from_folder_to_folder(tmp_path: Path) -> None:
    """It goes through ranks, a resume and a checkpoint; transformers loads what comes out."""
    from transformers import AutoModelForCausalLM

    folder, output = write_scaled(tmp_path / "scaled"), tmp_path / "exported"
    (folder / "tokenizer.json").write_text("{}")
    given = "--steps", "3", "--from", str(folder), TRUST
    training = Training(tmp_path, plan_for(folder), *given).finish()
    assert training.losses[-1] < training.losses[0]
    # a run's folder does not say by itself that its code is to be trusted
    start = tmp_path / "run" / "starts" / "1" / "start.json"
    content = json.loads(start.read_text())
    assert TRUST in content["command"]
    content["options"]["trust_remote_code"] = True
    start.write_text(json.dumps(content))
    again = "--resume", str(training.output), "--steps", "4"
    code, _, said = wait(start_with(tmp_path, *again), 60)
    assert code == 2 and UNTRUSTED in said
    code, _, said = wait(start_with(tmp_path, *again, TRUST), 150)
    assert code == 0, said
    # the folder may have moved by then
    moved = tmp_path / "moved"
    folder.rename(moved)
    given = str(training.output), "--output", str(output), "--from", str(moved)
    assert UNTRUSTED in refused(export.app, *given)
    passed(export.app, *given, TRUST)
    assert {"tokenizer.json", MODELING} <= {path.name for path in output.iterdir()}
    ours = AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True).eval()
    theirs = AutoModelForCausalLM.from_pretrained(moved, trust_remote_code=True).eval()
    tokens = torch.arange(32).view(1, -1)
    with torch.no_grad():
        trained, before = ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits
    assert not torch.allclose(trained, before, atol=1e-4)
    # that its weights are the checkpoint's: a step that changes nothing starts from them
    plan = plan_for(output)
    still = "--steps", "1", "--learning-rate", "1e-30", "--warmup-steps", "0", TRUST
    (tmp_path / "still").mkdir()
    Training(tmp_path / "still", plan, "--from", str(output), *still).finish()
    same = tmp_path / "same"
    passed(export.app, str(tmp_path / "still" / "run"), "--output", str(same), TRUST)
    loaded = AutoModelForCausalLM.from_pretrained(same, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, trained)


@pytest.mark.exhaustive
def test_a_chip_leaves_and_another_is_lost(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path / "scaled", weights=False)
    model: Any = read_model(folder, 32, trust_remote_code=True)
    (tmp_path / "alone").mkdir()
    alone = Undisturbed(tmp_path / "alone", model, TRUST)
    plan = plan_of(model, (2, 1, 1), (1, 1, 1), (2, 1, 2))
    training = Elastic(tmp_path, plan, "--notice", "250", TRUST)
    try:
        training.until(4)
        training.send(signal.SIGTERM, f"{NODE}-0/1")
        training.until_generation(2)
        training.until(training.changes[-1]["step"] + 3)
        training.send(signal.SIGKILL, f"{NODE}-1/0")
        training.until_generation(3)
        assert_as_undisturbed(training, alone)
    finally:
        training.process.kill()


IMPORTS = """
import pathlib, sys, time, heteropp, transformers.dynamic_module_utils
plan, ready, go = map(pathlib.Path, sys.argv[1:])
model = heteropp.read_plan(plan).model
model.allow_code(trust_remote_code=True)
ready.touch()
while not go.exists():
    time.sleep(0.001)
assert len(list(model.initial_values((0, 4), 0))) == len(model.parameters())
"""


@pytest.mark.exhaustive
def test_processes_that_import_at_once_do_not_meet(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path / "scaled", weights=False)
    with (folder / MODELING).open("a") as file:
        file.write("# what takes a while to copy\n" * 200_000)
    (tmp_path / "program.py").write_text(IMPORTS)
    heteropp.write_plan(plan_for(folder), tmp_path / "plan.json")
    go = tmp_path / "go"
    marks = [tmp_path / f"ready-{i}" for i in range(8)]
    processes = [
        forks.start(
            [str(tmp_path / "program.py"), str(tmp_path / "plan.json"), str(mark), str(go)],
            {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
        for mark in marks
    ]
    wait_for(lambda: all(mark.exists() for mark in marks))
    go.touch()
    for process in processes:
        code, stdout, stderr = wait(process, 120)
        assert code == 0, stdout + stderr


@pytest.mark.long
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path / "scaled", weights=False)
    (tmp_path / "file").touch()
    environment = {"HF_MODULES_CACHE": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path)}
    process = forks.start(["-m", "heteropp.cli.models", "check", str(folder), TRUST], environment)
    code, _, said = wait(process, 60)
    assert code == 2 and "HF_MODULES_CACHE names another folder" in said
    assert "Traceback" not in said
