"""Elementwise programs on the device: the checks that emulated chips pass, too."""

from __future__ import annotations

import forks
import pytest
from on_opencl import ROOT, environment

CHECKS = "tests/ditorch/checks/check_elementwise.py"
SOME = "nan or optimizer or (powers and float32)"


@pytest.mark.parametrize(
    "chosen", [SOME, pytest.param("", marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.timeout(900)
def test_elementwise_operators_are_the_devices_own(chosen: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", "-k", chosen]
    done = forks.run(["-m", "pytest", *options, CHECKS], environment(), ROOT, timeout_s=850)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
