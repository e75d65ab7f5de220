"""Results that depend on less than what they are made from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """The last results, by what they depend on; of what they were made from nothing is kept."""

    def __init__(self, most: int) -> None:
        """most: results that are remembered."""
        self._found = lru_cache(maxsize=most)(_made)
        self.cache_clear = self._found.cache_clear

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result for a key, made unless it is remembered."""
        return self._found(_Asked(key, make))


class _Asked(Generic[T]):
    """A key, equal to the same key whatever would make its result."""

    def __init__(self, key: Hashable, make: Callable[[], T]) -> None:
        self.key = key
        self.make: Callable[[], T] | None = make

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key


def _made(asked: _Asked[T]) -> T:
    assert asked.make is not None  # it is asked once
    result = asked.make()
    asked.make = None  # which holds whole plans, say
    return result
