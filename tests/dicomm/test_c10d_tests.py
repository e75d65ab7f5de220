"""tools/c10d-tests: a few of PyTorch's own tests every day; all of them by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import async_chip
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TESTS = ("test_all_reduce_sum", "test_broadcast_cuda")
MORE = (*TESTS, "test_all_gather_coalesced_simple", "test_send_recv_any_source")


def run_tool(
    folder: Path, *arguments: str, environment: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TOOLS.parent), str(TOOLS)])
    return subprocess.run(
        [sys.executable, "-m", "c10d_tests", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": path.lstrip(os.pathsep)},
        cwd=folder, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize(
    "tests",
    [pytest.param(TESTS, marks=pytest.mark.long), pytest.param(MORE, marks=pytest.mark.exhaustive)],
)
def test_a_slice_of_pytorchs_own_tests(tmp_path: Path, tests: tuple[str, ...]) -> None:
    done = run_tool(tmp_path, *tests, "--json")
    outcomes = {test["name"]: test["outcome"] for test in json.loads(done.stdout)["tests"]}
    assert outcomes.pop("test_broadcast_cuda") == "not applicable"
    assert outcomes == dict.fromkeys(outcomes, "passed"), done.stdout
    assert len(outcomes) == len(tests) - 1
    assert done.returncode == 0


@pytest.mark.exhaustive
def test_a_slice_on_a_chip_that_computes_asynchronously(tmp_path: Path) -> None:
    arguments = (*MORE, "--device", "device", "--json")
    environment = async_chip.environment() | {"DICOMM_STRATEGY": "cpu-mediated"}
    done = run_tool(tmp_path, *arguments, environment=environment)
    outcomes = {test["name"]: test["outcome"] for test in json.loads(done.stdout)["tests"]}
    assert outcomes.pop("test_broadcast_cuda") == "not applicable"
    assert outcomes == dict.fromkeys(outcomes, "passed"), done.stdout
    # the tensors are the chip's: the host cannot touch them
    done = run_tool(tmp_path, TESTS[0], *arguments[-3:], environment=async_chip.environment())
    (failed,) = json.loads(done.stdout)["tests"]
    assert "memory that the host can touch, which asyncchip:0 does not give" in failed["reason"]


def test_a_worker_that_names_no_tests_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from c10d_tests import __main__ as tool

    workers = []

    class Kept(tool.Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            workers.append(self)

    monkeypatch.setenv("PYTHONPATH", f"{TOOLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(tool, "Worker", Kept)
    monkeypatch.setattr(tool, "IMPORT_S", 0.01)
    with pytest.raises(SystemExit, match=r"not imported within 0.01 s"):
        tool.list_tests(tmp_path)
    assert workers[0].process.returncode is not None


def test_an_impossible_slice_is_refused(tmp_path: Path) -> None:
    done = run_tool(tmp_path, "--slice", "3/2")
    assert (done.returncode, done.stderr) == (
        2, "--slice 3/2: expected K/N with 1 <= K <= N, such as 1/4\n",
    )  # fmt: skip
