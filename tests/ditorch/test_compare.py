"""Compare: right chips pass, planted faults are found and named."""

from __future__ import annotations

import pytest
from on_chip import run_checks
from sampled import sampled


def test_faults_are_found_and_named() -> None:
    run_checks("d-mini", "check_compare.py")


@pytest.mark.parametrize("chip", sampled(["d-mini", "a-mini", "b-mini", "c-mini"], 3, everyday=1))
def test_right_kernels_of_every_chip_pass(chip: str) -> None:
    run_checks(chip, "check_compare_training.py")


def test_the_host_against_float64() -> None:
    run_checks(None, "check_compare_host.py")
