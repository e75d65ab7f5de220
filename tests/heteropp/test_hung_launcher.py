"""A launcher that does not collect its ended process is killed; one that does lives on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from heteropp.runtime.ranks.hung_launcher import PATIENCE_S

LAUNCHER = f"""
import os, sys, time
from heteropp.runtime.ranks.hung_launcher import end_if_hung
launched = os.fork()
if not launched:
    end_if_hung(os.getppid())
    os._exit(1)
if sys.argv[1] == "collects":
    os.waitpid(launched, 0)
time.sleep({2 * PATIENCE_S + 10})
"""


@pytest.mark.long
def test_a_launcher_that_hangs_is_killed() -> None:
    collects, hangs = (
        subprocess.Popen([sys.executable, "-c", LAUNCHER, how], stderr=subprocess.PIPE, text=True)
        for how in ("collects", "hangs")
    )
    _, said = hangs.communicate(timeout=120)
    assert hangs.returncode == -9
    assert said == "torchrun does not hear its store either, and was killed\n"
    _, said = collects.communicate(timeout=120)
    assert (collects.returncode, said) == (0, "")
