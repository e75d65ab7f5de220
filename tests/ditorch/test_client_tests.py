"""tools/client-tests counts a suite that is given by path, on a chip beside the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import forks
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SUITE = """
import os
import unittest

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCPU
from torch.testing._internal.common_utils import TestCase


class TestTiny(TestCase):
    def test_passes(self, device):
        self.assertEqual((torch.ones(3, device=device) + 1).device.type, torch.device(device).type)

    def test_names_its_vendor(self, device):
        if torch.device(device).type == "npu":
            self.assertTrue(torch.npu.is_available() and torch.ones(1).npu().is_npu)

    def test_fails_on_a_chip(self, device):
        self.assertEqual(torch.device(device).type, "cpu")

    def test_ends_on_a_chip(self, device):
        if torch.device(device).type != "cpu":
            os._exit(3)

    def test_fails_everywhere(self, device):
        self.assertEqual(torch.ones(1, device=device), torch.zeros(1, device=device))

    @onlyCPU
    def test_is_the_cpus(self, device):
        pass


instantiate_device_type_tests(TestTiny, globals(), only_for="privateuse1")
"""
ENDING = """
import os

import pytest


@pytest.fixture
def ends_afterwards():
    yield
    os._exit(3)


def test_first():
    pass


def test_ends(ends_afterwards):
    pass


def test_last():
    pass
"""


def run_tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TOOLS.parent), str(TOOLS)])
    environment = os.environ | {"PYTHONPATH": path.lstrip(os.pathsep)}
    return forks.run(["-m", "client_tests", *arguments], environment, folder, timeout_s=200)


@pytest.mark.exhaustive
def test_each_outcome_of_a_suite_given_by_path(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_tiny.py").write_text(SUITE)
    done = run_tool(
        tmp_path,
        "pytorch",
        "test/test_tiny.py",
        "--chip",
        "b-mini",
        "--written-for",
        "npu",
        "--json",
    )
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    tests = {
        test["name"].partition("::test_")[2].removesuffix("_device"): (
            test["outcome"],
            test["reason"],
        )
        for test in said["tests"]
    }
    outcomes = {name: outcome for name, (outcome, _) in tests.items()}
    assert outcomes == {
        "passes": "passed",
        "names_its_vendor": "passed",
        "fails_on_a_chip": "failed",
        "ends_on_a_chip": "failed",
        "fails_everywhere": "not applicable",
        "is_the_cpus": "not applicable",
    }
    assert "'emuchip'" in tests["fails_on_a_chip"][1]
    assert tests["ends_on_a_chip"][1] == "ended its process"
    assert tests["fails_everywhere"][1] == "fails on the CPU too"
    assert tests["is_the_cpus"][1].startswith("skipped: ")
    assert {row["name"]: row["ours"] for row in said["rows"]} == {
        "passed": 2, "failed": 2, "not applicable": 2,
    }  # fmt: skip


def test_a_process_that_ends_behind_a_result_takes_no_other_test_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client_tests.__main__ import Run
    from client_tests.suites import SUITES

    monkeypatch.setenv("PYTHONPATH", f"{TOOLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_tiny.py").write_text(ENDING)
    run = Run(
        SUITES["peft"], tmp_path, ["tests/test_tiny.py"], None, "cpu", "1/1", "", 100.0,
        tmp_path / "log",
    )  # fmt: skip
    found = {name.partition("::")[2]: result for name, result in run.results().items()}
    assert {name: result.outcome for name, result in found.items()} == {
        "test_first": "passed", "test_ends": "failed", "test_last": "passed",
    }  # fmt: skip
    assert found["test_ends"].reason == "ended its process"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["torchvision"], "torchvision is no suite: expected one of "),
        (["pytorch"], "--source . has no folder 'test': expected the repository of pytorch"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = run_tool(tmp_path, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(sentence)


def test_an_unknown_chip_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_tiny.py").write_text(SUITE)
    done = run_tool(tmp_path, "pytorch", "test/test_tiny.py", "--chip", "nothing")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("--chip nothing: ")
