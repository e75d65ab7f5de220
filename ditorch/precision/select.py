"""Which operator calls a tool sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypedDict

from ditorch.precision.place import Place


class Selection(TypedDict, total=False):
    """The arguments of every tool that say which calls it sees; left out, it sees all."""

    operators: str | Sequence[str]  # names or shell patterns, "mm, *softmax*"; absent: all
    modules: str | Sequence[str]  # qualified names or patterns, "layers.3*"; absent: all
    ranks: int | Sequence[int]  # ranks that it works in; absent: all
    steps: str | int  # steps, and [first, last) ranges of them, "0:10, 50"; absent: all


@dataclass(frozen=True)
class Select:
    """Empty fields select everything. Operators and modules are shell patterns."""

    operators: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()
    steps: tuple[tuple[int, int], ...] = ()  # [first, last) pairs
    _known: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        *,
        operators: str | Sequence[str] = (),
        modules: str | Sequence[str] = (),
        ranks: int | Sequence[int] = (),
        steps: str | int = "",
    ) -> Select:
        """Parses what a person writes, such as "mm, *softmax*", "layers.3*", 0 and "0:10, 50".

        Raises:
            ValueError: `steps` is malformed, or a rank is negative.
        """
        chosen = frozenset([ranks] if isinstance(ranks, int) else ranks)
        if any(rank < 0 for rank in chosen):
            raise ValueError(f"ranks is {ranks!r}, expected ranks from 0")
        return cls(_patterns(operators), _patterns(modules), chosen, _intervals(str(steps)))

    def matches(self, place: Place) -> bool:
        return (
            (not self.ranks or place.rank in self.ranks)
            and (not self.steps or any(a <= place.step < b for a, b in self.steps))
            and (not self.operators or self.matches_operator(place.operator))
            and (not self.modules or any(fnmatchcase(place.module, m) for m in self.modules))
        )

    def matches_operator(self, operator: str) -> bool:
        """ "aten.mm.default" is matched as such, as "aten.mm" and as "mm"."""
        known = self._known.get(operator)
        if known is None:
            qualified = operator.rpartition(".")[0]
            names = (operator, qualified, qualified.partition(".")[2])
            known = any(fnmatchcase(name, p) for name in names for p in self.operators)
            self._known[operator] = known
        return known


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts if part.strip())


def _intervals(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(_interval(part.strip(), text) for part in text.split(",") if part.strip())


def _interval(part: str, text: str) -> tuple[int, int]:
    first, colon, last = part.partition(":")
    try:
        start = int(first or 0)
        end = (int(last) if last else 2**63) if colon else start + 1
    except ValueError:
        end = start = -1
    if not 0 <= start < end:
        raise ValueError(f'steps is {text!r}, expected steps and ranges such as "0:10, 50"')
    return start, end
