"""Elementwise programs on the device."""

from __future__ import annotations

import pytest
from on_opencl import run_checks

SOME = "nan or optimizer or (powers and float32)"
MORE = "float32 or bits or truth or casts"


@pytest.mark.parametrize(
    "chosen",
    [
        SOME,
        pytest.param(MORE, marks=pytest.mark.exhaustive),
        pytest.param("", marks=pytest.mark.exhaustive),
    ],
    ids=["some", "more", "all"],
)
@pytest.mark.timeout(900)
def test_elementwise_operators_are_the_devices_own(chosen: str) -> None:
    run_checks("check_elementwise.py", chosen=chosen)
