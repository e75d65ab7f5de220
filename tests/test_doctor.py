"""`python -m hyperhetero doctor`, from outside, on machines that lack this or that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from installed import own_mounts

DOCTOR = (sys.executable, "-m", "hyperhetero", "doctor")


def ask(*before: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns the exit code and the findings by name; `before` is what starts the command."""
    done = subprocess.run(
        [*before, *DOCTOR, "--json"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stderr == "", done.stderr
    answer = json.loads(done.stdout)
    assert answer["ready"] == (done.returncode == 0)
    return done.returncode, {finding["name"]: finding for finding in answer["findings"]}


def test_where_all_that_is_required_is_here_the_table_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *DOCTOR[1:]],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout
    assert "Everything that is required is here" in done.stdout
    assert "what the lack costs" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hyperhetero.doctor.look" in imported and not imported & {"torch", "ditorch"}


def test_every_lack_has_a_cost_and_nothing_else_has() -> None:
    code, findings = ask()
    assert code == 0
    for finding in findings.values():
        assert finding["found"]
        assert bool(finding["cost"]) == (finding["state"] != "here")


@pytest.mark.long
def test_without_a_compiler_on_the_path_it_says_what_cannot_be_built(tmp_path: Path) -> None:
    code, findings = ask(PATH=str(tmp_path))
    assert code == 0
    assert findings["C++ compiler"]["state"] == "absent"
    assert "no build from source" in findings["C++ compiler"]["cost"]
    assert findings["ssh"]["state"] == findings["Slurm"]["state"] == "absent"


@pytest.mark.long
def test_a_compiler_is_named_with_its_version(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 12.9\n")
    compiler.chmod(0o755)
    _, findings = ask(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert findings["C++ compiler"]["found"] == f"{compiler}, version 12.9"


@pytest.mark.long
def test_a_torch_out_of_range_is_missing(tmp_path: Path) -> None:
    metadata = tmp_path / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    code, findings = ask(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert findings["packages"]["state"] == "missing"
    assert findings["packages"]["found"].startswith("torch is 1.0, expected ")


def test_libraries_that_do_not_load_are_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: undefined symbol')\n")
    code, findings = ask(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert findings["our libraries"]["state"] == "missing"
    assert findings["our libraries"]["found"] == "ImportError: libtorch.so: undefined symbol"


@pytest.mark.long
def test_limits_of_the_process_are_told() -> None:
    code, findings = ask("bash", "-c", 'ulimit -Sn 100; exec "$@"', "-")
    assert code == 0
    assert (
        findings["open files"]["found"] == "100" and "ulimit -n" in findings["open files"]["cost"]
    )


def test_a_small_shared_memory_costs_ranks_their_start() -> None:
    mounted = 'mount -t tmpfs -o size=64k small /dev/shm && exec "$@"'
    code, findings = ask(*own_mounts(), "sh", "-c", mounted, "-")
    assert code == 0
    assert findings["/dev/shm"]["state"] == "absent"
    assert findings["/dev/shm"]["found"] == "0.1 of 0.1 MiB free"
    assert "--shm-size" in findings["/dev/shm"]["cost"]


def test_an_unknown_option_is_one_sentence() -> None:
    done = subprocess.run([*DOCTOR, "--nothing"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "No such option: --nothing; see python -m hyperhetero doctor --help"
    ]
