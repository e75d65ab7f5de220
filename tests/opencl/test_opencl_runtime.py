"""Memory, copies, streams and events of an OpenCL device."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forks
import pytest
from on_opencl import ROOT, environment, lines, run

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    "script",
    [
        "memory",
        "streams",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("profiler", "training")),
    ],
)
def test_the_runtime_does_what_torch_asks_of_a_device(script: str) -> None:
    assert lines((SCRIPTS / f"{script}.py").read_text())[-1] == "done"


def test_the_vendors_list_says_how_to_choose_it() -> None:
    def listed(**extra: str) -> dict[str, object]:
        done = forks.run(["-m", "ditorch", "--json"], environment(**extra), ROOT, timeout_s=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (row,) = (row for row in listed()["vendors"] if row["vendor"] == "opencl")
    assert row["chosen"] and row["state"] == "found"
    (row,) = (row for row in listed(DITORCH_VENDOR="")["vendors"] if row["vendor"] == "opencl")
    assert not row["chosen"] and "DITORCH_VENDOR=opencl chooses it" in row["why"]


def test_a_machine_without_a_driver_is_one_sentence(tmp_path: Path) -> None:
    done = run("import ditorch", OCL_ICD_VENDORS=f"{tmp_path}{os.sep}")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "finds no chip on this machine" in said and "libditorch_opencl.so" in said
    assert "pocl-opencl-icd" in said
