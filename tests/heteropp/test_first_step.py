"""The first step of a run: it is as long as the others, as what it needs is there before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_ranks_import_nothing_in_their_first_step(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, first_step\nsys.exit(first_step.main(pathlib.Path(sys.argv[1])))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "rank 0 imported" in result.stderr and "rank 1 imported" in result.stderr
    assert result.returncode == 0, result.stderr
