"""tools/gpu-check where there is no GPU: one sentence, or a rehearsal on an emulated chip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from evidence import is_met
from gpu_check.part import rehearsing_part
from gpu_check.processes import StepError
from gpu_check.step import STEPS, Step, perform

TOOLS = Path(__file__).parents[1] / "tools"
EVIDENCE = TOOLS.parent / "docs" / "gpu.json"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def check(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [str(TOOLS / "gpu-check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


@NO_GPU
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        pytest.param(("--json",), marks=pytest.mark.long),
        pytest.param(("--only", "builds"), marks=pytest.mark.long),
    ],
)
def test_without_a_gpu_it_says_one_sentence(arguments: tuple[str, ...]) -> None:
    done = check(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("gpu-check: there is no NVIDIA GPU that torch can use: ")


def test_packages_that_are_not_here_are_named() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-m", "gpu_check"],  # -S: without what is installed
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TOOLS)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert " lacks torch, numpy, pydantic, " in sentence


def test_a_step_that_is_not_there() -> None:
    done = check("--rehearse", "--only", "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    steps = ", ".join(step.name for step in STEPS)
    assert done.stderr == f"gpu-check: --only is nothing; expected one of {steps}\n"


def test_a_step_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TOOLS}{os.pathsep}{TOOLS.parent}")
    with pytest.raises(StepError, match=r"^it did not end within 0\.4 s$"):
        perform(Step("conform", 0.1), rehearsing_part(tmp_path), tmp_path)


def test_a_step_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TOOLS}{os.pathsep}{TOOLS.parent}")
    part = rehearsing_part(tmp_path)
    Path(part.chip).write_text("vendor = 1")
    with pytest.raises(StepError, match=f"^.*{part.chip}.*$"):
        perform(Step("builds", 60), part, tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(("builds", "losses", "messages", "training"), marks=pytest.mark.long),
        pytest.param((), marks=pytest.mark.exhaustive, id="all"),
    ],
)
def test_a_rehearsal_takes_its_steps_and_writes_nothing(
    steps: Sequence[str], tmp_path: Path
) -> None:
    before = EVIDENCE.read_bytes() if EVIDENCE.exists() else None
    only = [word for name in steps for word in ("--only", name)]
    kept = tmp_path / "kept"
    done = check("--rehearse", "--json", *only, "--output", str(kept), timeout_s=1100)
    rows = json.loads(done.stdout)["rows"]
    failed = [f"{each['name']}: {each['peer_name']}" for each in rows if each["ours"] is None]
    said = [f"{file.name}:\n{file.read_text()}" for file in kept.glob("*.txt")]
    assert not failed, "\n".join(failed + said)
    missed = [each for each in rows if each["bar"] is not None and not is_met(each)]
    assert done.returncode == 0, missed or done.stderr
    assert all(each["name"].startswith("rehearsal: ") for each in rows)
    assert len(rows) > len(steps or STEPS)
    assert (EVIDENCE.read_bytes() if EVIDENCE.exists() else None) == before
