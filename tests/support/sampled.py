"""Long tests of many values: CI runs a sample of them, `-m exhaustive` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Returns a test's parameters: every so manieth is long, beginning with the first.

    A tuple is a value for each of several names.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=pytest.mark.exhaustive if i % every else pytest.mark.long,
        )
        for i, value in enumerate(values)
    ]
