"""Who takes the GPU's part: the GPU, or in a rehearsal an emulated chip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REHEARSING = "b-mini"  # the emulated chip, but for what its memory holds and how hosts reach it
CHANGES = {"capacity_bytes": "1_073_741_824", "host_bytes_per_s": "1e10"}
OTHER = "a-mini"  # the emulated chip that trains with the GPU and the CPU


@dataclass(frozen=True)
class Part:
    chip: str  # a chip file's path, or the name of one that is shipped
    is_rehearsed: bool = False

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process on it is started with."""
        if not self.is_rehearsed:
            return {"DITORCH_VENDOR": "cuda"}
        # as of a GPU, whose memory the host cannot touch
        mediated = {"DICOMM_STRATEGY": "cpu-mediated"}
        return {"DITORCH_VENDOR": "emuchip", "DITORCH_CHIP": self.chip, **mediated}

    @property
    def align_name(self) -> str:
        """Its name for ditorch-align."""
        return self.chip if self.is_rehearsed else "cuda"


def rehearsing_part(folder: Path) -> Part:
    """Writes the chip file of the emulated chip that takes the GPU's part."""
    from heteropp.description.chips import load_chip

    text = load_chip(REHEARSING).path.read_text()
    for key, value in CHANGES.items():
        text = re.sub(rf"(?m)^({key} *=).*", rf"\1 {value}", text)
    path = folder / "rehearsed-gpu.toml"
    path.write_text(text)
    return Part(str(path), is_rehearsed=True)


@dataclass(frozen=True)
class Found:
    """What a step found: rows of evidence, and sentences that a reader must know."""

    rows: list[dict[str, Any]]
    notes: list[str]
