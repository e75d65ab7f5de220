"""Elementwise programs on the device."""

from __future__ import annotations

import pytest
from on_opencl import run_checks

SOME = "nan or optimizer or (powers and float32)"


@pytest.mark.parametrize(
    "chosen", [SOME, pytest.param("", marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.timeout(900)
def test_elementwise_operators_are_the_devices_own(chosen: str) -> None:
    run_checks("check_elementwise.py", chosen=chosen)
