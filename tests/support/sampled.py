"""Tests of many values: some run every day, of the others a sample in CI, all by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], every: int, everyday: int = 0) -> list[Any]:
    """Returns a test's parameters: of those after the everyday ones every so manieth is long.

    The first of them is. A tuple is a value for each of several names.
    """

    def marks(index: int) -> tuple[pytest.MarkDecorator, ...]:
        if index < everyday:
            return ()
        return (pytest.mark.exhaustive if (index - everyday) % every else pytest.mark.long,)

    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks(index))
        for index, value in enumerate(values)
    ]
