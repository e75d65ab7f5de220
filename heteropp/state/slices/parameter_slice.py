"""A slice of a parameter, the block that it belongs to, and where it lies in a file."""

from __future__ import annotations

from dataclasses import dataclass

from heteropp.layout.boxes import Box
from heteropp.state.slices.quantities import StoredName


@dataclass(frozen=True)
class ParameterSlice:
    """A box of a parameter of the whole model."""

    name: str
    box: Box


@dataclass(frozen=True, order=True)
class Shard:
    """A rank's share of a block: one of `tp` parts, and of that one of ZeRO's `parts`."""

    tp_index: int = 0
    tp: int = 1
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        zero = f" part {self.part}/{self.parts}" if self.parts > 1 else ""
        return f"{self.tp_index}/{self.tp}{zero}"

    @property
    def suffix(self) -> str:
        """The part of a file's name that tells the shard, such as "tp-0-of-2.part-1-of-4"."""
        zero = f".part-{self.part}-of-{self.parts}" if self.parts > 1 else ""
        return f"tp-{self.tp_index}-of-{self.tp}{zero}"


@dataclass(frozen=True)
class StoredSlice:
    """A tensor in a file: a quantity of a box of a parameter of the whole model."""

    quantity: StoredName
    name: str
    box: Box
    dtype: str
    begin: int  # byte of the file
    end: int


def block_of(name: str) -> str:
    """Returns the block of the model that a parameter belongs to: "layers.3", "embedding"."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first
