"""One check of the conformance suite's runtime part, and the list that a file of them makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class Unsupported(Exception):
    """The vendor says it has no such thing; the message is its reason, in one sentence."""


@dataclass(frozen=True)
class Check:
    group: str  # "memory", "stream", ...
    name: str  # what holds when it passes: "a freed block is used again"
    run: Callable[[], None]  # raises if it does not hold; Unsupported if there is no such thing


@dataclass(frozen=True)
class Group:
    """The checks of one subject, in order; calling it with what holds adds a function."""

    name: str
    checks: list[Check] = field(default_factory=list)

    def __call__(self, holds: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def add(run: Callable[[], None]) -> Callable[[], None]:
            self.checks.append(Check(self.name, holds, run))
            return run

        return add
