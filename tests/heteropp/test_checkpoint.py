"""Checkpoints appear whole or not at all, and a resumed run is the run that was not interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import training_run
from safetensors.torch import load_file
from training_run import (
    Training,
    checkpoint_parameters,
    make_plan,
    start,
    tiny_model,
    wait,
    write_cluster,
)

from heteropp.plan import write_plan

PLAN = make_plan(tiny_model(), (2, 2), (2, 1), (1, 2), (True, False))
SETTINGS = ("--decay-steps", "6", "--warmup-steps", "2", "--checkpoint-every", "2", "--keep", "2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Six steps without a stop."""
    return Training(tmp_path_factory.mktemp("whole"), PLAN, "--steps", "6", *SETTINGS).finish()


@pytest.fixture
def copy(whole: Training, tmp_path: Path) -> Path:
    """The folder of a finished run, to damage."""
    folder = tmp_path / "copy"
    shutil.copytree(whole.output.parent, folder)
    return folder


def resume(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, "--resume", "--checkpoint-every", "2", *arguments)
    return wait(process, 120)


def refusal(folder: Path, *arguments: str) -> str:
    """The one sentence of a resume that is refused."""
    sentence = training_run.refusal(folder, "--resume", "--steps", "8", *arguments)
    assert sentence.count("\n") == 1, sentence
    return sentence


def test_a_resumed_run_equals_an_uninterrupted_one(whole: Training, tmp_path: Path) -> None:
    Training(tmp_path, PLAN, "--steps", "4", *SETTINGS).finish()
    code, _, stderr = resume(tmp_path, "--steps", "6")
    assert code == 0, stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [line[name] for line in metrics] == [line[name] for line in whole.metrics]
    newest = "checkpoints/step-000006"
    for rank in range(PLAN.world_size):
        ours = load_file(tmp_path / "run" / newest / f"rank-{rank:05d}.safetensors")
        theirs = load_file(whole.output / newest / f"rank-{rank:05d}.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_newest_are_kept_and_hold_the_whole_model(whole: Training) -> None:
    names = sorted(path.name for path in (whole.output / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006"]
    parameters = checkpoint_parameters(PLAN, whole.output / "checkpoints" / names[-1])
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    assert shapes["embedding.weight"] == shapes["head.weight"] == (256, 32)
    assert shapes["layers.3.mlp.down.weight"] == (32, 64)
    assert len(shapes) == 4 * 9 + 3


def test_what_a_crash_leaves_is_passed_over(copy: Path) -> None:
    checkpoints = copy / "run" / "checkpoints"
    (checkpoints / "step-000006" / "manifest.json").unlink()
    (checkpoints / ".step-000006.partial").mkdir()
    code, _, stderr = resume(copy, "--steps", "6")
    assert code == 0, stderr
    lines = (copy / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["step-000004", "step-000006"]


def test_a_torn_file_is_named(copy: Path) -> None:
    torn = copy / "run" / "checkpoints" / "step-000006" / "rank-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    assert f"{torn} is damaged: it has" in refusal(copy)


def test_a_flipped_bit_is_named(copy: Path) -> None:
    flipped = copy / "run" / "checkpoints" / "step-000006" / "rank-00002.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    assert f"{flipped} is damaged: its hash is not the manifest's" in refusal(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    missing = copy / "run" / "checkpoints" / "step-000006" / "rank-00000.safetensors"
    missing.unlink()
    assert f"{missing} cannot be read: No such file" in refusal(copy)


def test_a_torn_manifest_is_named(copy: Path) -> None:
    manifest = copy / "run" / "checkpoints" / "step-000006" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    assert f"{manifest} is not JSON" in refusal(copy)


def test_another_plan_is_refused(copy: Path) -> None:
    write_plan(make_plan(tiny_model(), (1, 3), (2, 1), (1, 2), (True, False)), copy / "plan.json")
    assert "was made under another plan" in refusal(copy)


def test_other_data_is_refused(copy: Path) -> None:
    (copy / "text" / "c.txt").write_text("more")
    assert "was made with other data" in refusal(copy)


def test_other_settings_are_refused(copy: Path) -> None:
    assert "was made with learning_rate 0.001, not 0.5" in refusal(copy, "--learning-rate", "0.5")
    assert "was made with seed 0, not 3" in refusal(copy, "--seed", "3")


def test_a_run_does_not_write_over_another(copy: Path) -> None:
    assert "holds checkpoints of an earlier run; give --resume" in training_run.refusal(copy)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    write_cluster(tmp_path, PLAN.world_size)
    (tmp_path / "text").mkdir()
    assert "holds no checkpoint" in refusal(tmp_path)
