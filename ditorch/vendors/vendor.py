"""What a vendor's file declares, and what looking for the vendor's chip answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch


@dataclass(frozen=True)
class Quirks:
    """What scripts expect of every device and this vendor's lacks; `quirks.py` handles it."""

    substitutes: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """dtype the chip lacks -> the one its tensors get instead, with one warning."""
    refused: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """dtype the chip lacks -> the one the error advises: it would change what a script computes."""
    average_by_sum: bool = False
    """The vendor's collectives lack ReduceOp.AVG: inputs are divided beforehand, then summed."""
    collectives_refused: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """dtype its reductions between chips lack -> the one the error advises."""

    def sentences(self) -> list[str]:
        """Describes each quirk in one phrase for people to read."""

        def names(dtypes: Mapping[torch.dtype, torch.dtype]) -> list[tuple[str, str]]:
            return [(str(a).removeprefix("torch."), str(b)[6:]) for a, b in dtypes.items()]

        said = [f"{lacks} tensors become {gets}" for lacks, gets in names(self.substitutes)]
        said += [f"no {lacks} (use {gets})" for lacks, gets in names(self.refused)]
        said += ["ReduceOp.AVG is divide, then SUM"] if self.average_by_sum else []
        refused = names(self.collectives_refused)
        return said + [f"no {lacks} in reductions (use {gets})" for lacks, gets in refused]


@dataclass(frozen=True)
class Look:
    """The answer to "is this vendor's chip here?"."""

    state: Literal["found", "not found", "broken"]
    why: str  # half a sentence
    device_type: str = ""  # of the device torch has for it; empty: ditorch makes it from `library`
    library: Path | None = None  # speaks the two ABIs
    name: str = ""  # its own, where the file stands for many vendors
    asked: bool = False  # the environment names it, so being broken is an error


@dataclass(frozen=True, eq=False)
class Vendor:
    """One vendor's file: data and a way to look."""

    name: str  # what DITORCH_VENDOR calls it
    maker: str
    look: Callable[[], Look]
    quirks: Quirks = field(default_factory=Quirks)
    has_quirks: Callable[[], bool] = lambda: True  # where only some of its chips have them
    advice: str = ""  # half a sentence, for whoever has its library and no chip that it can drive


def not_found(why: str) -> Look:
    return Look("not found", why)


def found(device_type: str, why: str, name: str = "") -> Look:
    return Look("found", why, device_type=device_type, name=name)
