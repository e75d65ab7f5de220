"""Seconds invented for stages, which nothing remembers beyond a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from invented import Invent, forget

from heteropp.cost import planned
from heteropp.cost.stage_time import Time


@pytest.fixture
def invent_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[Invent]:
    """A function that puts another in the place of heteropp.cost.stage_time.stage_time."""

    def invent(stage_time: Callable[..., Time]) -> None:
        forget()
        monkeypatch.setattr(planned, "stage_time", stage_time)

    yield invent
    forget()
