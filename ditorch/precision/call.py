"""One operator call, as the precision tools see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from ditorch.precision.place import Place


@dataclass(frozen=True, slots=True)
class Call:
    """An ATen or communication operator about to run below autograd, forward or backward."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place

    @property
    def operator(self) -> str:
        """The operator's full name, for example "aten.mm.default"."""
        return self.place.operator
