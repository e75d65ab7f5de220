"""tools/bench prints its table, keeps the figures and sets kept ones beside new ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHIP = ROOT / "tests" / "benchmarks" / "chip.toml"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_stored_run_is_compared_with(tmp_path: Path) -> None:
    # what tools/bench runs, with figures kept elsewhere
    command = [sys.executable, "-m", "pytest", "tests/benchmarks", "-o", "python_files=bench_*.py"]
    command += ["-o", "addopts=", f"--benchmark-storage=file://{tmp_path}"]
    # workers of this pytest are not those of that one, which would then time nothing
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    every = "1f1b or (shm and 8) or add or (quickstart and exact) or dicomm"
    groups = ("operators of emuchip", "planners", "point-to-point", "start-up")
    for more, chosen, shown in (
        ("--benchmark-save=kept", every, groups),
        ("--benchmark-compare", "add or (quickstart and exact)", groups[:2]),
    ):
        done = subprocess.run(
            [*command, "-k", chosen, more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**alone, "DITORCH_VENDOR": "emuchip", "DITORCH_CHIP": str(CHIP)},
        )
        assert done.returncode == 0, done.stdout
        for group in shown:
            assert f"benchmark '{group}" in done.stdout
    assert "(0001_kept)" in done.stdout and "(NOW)" in done.stdout
