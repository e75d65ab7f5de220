"""The precision tools' common part: what they see, where, and how configuration opens them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import forks
from on_chip import DEADLINE_S, environment, run_checks, run_python

SCRIPT = """
import torch
import ditorch

(torch.zeros(3, device="device") + 0).log()
"""


def run_script(folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return forks.run(["script.py"], environment("b-mini", **extra), folder, timeout_s=DEADLINE_S)


def test_core() -> None:
    run_checks("b-mini", "check_precision_core.py")


UNCONFIGURED = """
import sys, torch
before = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
import ditorch
from torch.overrides import _len_torch_function_stack
assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == before == []
assert _len_torch_function_stack() == 0
assert not [name for name in sys.modules if name.startswith("ditorch.precision")]
assert not torch.nn.modules.module._global_forward_hooks
"""


def test_a_program_without_tools_has_nothing_in_its_way(tmp_path: Path) -> None:
    done = run_python(UNCONFIGURED, "b-mini")
    assert done.returncode == 0, done.stderr


def test_a_file_opens_tools_without_touching_the_script(tmp_path: Path) -> None:
    (tmp_path / "ditorch.toml").write_text(
        '[precision.overflow]\noutput = "found"\n\n[precision.time]\noperators = "log, add"\n'
    )
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stderr.splitlines() if line.startswith("ditorch: "))
    assert [line.split(":")[1].strip() for line in told] == ["overflow", "time"]
    assert "found/overflow-rank0.json" in told[0]
    assert "in 2 calls of 2 operators" in told[1]
    findings = json.loads((tmp_path / "found" / "overflow-rank0.json").read_text())
    assert findings["first_bad"]["operator"] == "aten.log.default"
    assert findings["first_bad"]["source"] == "script.py:5 in <module>"
    assert (findings["tool"], findings["device"], findings["passed"]) == (
        "overflow",
        "emuchip:0",
        False,
    )
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["overflow-rank0.json"]


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "ditorch.toml").write_text("[precision.oops]\n")
    done = run_script(tmp_path, DITORCH_PRECISION='overflow = {operators = "add"}')
    assert done.returncode == 0, done.stderr
    assert "ditorch: overflow: no overflow in 1 calls" in done.stderr


def test_findings_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "found").write_text("a file, not a folder")
    done = run_script(tmp_path, DITORCH_PRECISION='time = {output = "found"}')
    assert "ditorch: findings were lost: " in done.stderr and "found" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_configuration_that_cannot_be_used_stops_the_script(tmp_path: Path) -> None:
    (tmp_path / "ditorch.toml").write_text("[precision.oops]\n")
    done = run_script(tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: ditorch.toml: oops: unknown tool, expected one of compare, "
    )
