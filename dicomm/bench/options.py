"""Reads what a person typed; a mistake is one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BadOption(Exception):
    """One sentence for the person who typed it."""


def parse_sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        number = word.strip().upper().removesuffix("IB").removesuffix("B")
        unit = number[-1:] if number[-1:] in "KMG" else ""
        digits = number.removesuffix(unit) if unit else number
        if not digits.isdecimal() or not 1 <= int(digits) * UNITS[unit] <= 1 << 30:
            raise BadOption(
                f"--sizes: '{word.strip()}' is not a size between 1 and 1G bytes, like 8, 4K or 64M"
            )
        sizes.append(int(digits) * UNITS[unit])
    return sorted(set(sizes))


def parse_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """A comma list of known names, in the known order; "none" where that is one of them."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise BadOption(f"{option}: '{word}' is not one of {', '.join(known)}")
    return [name for name in known if name in words]


def parse_ranks(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 2 <= int(word) <= 64:
            raise BadOption(f"--ranks: '{word}' is not a number of ranks between 2 and 64")
    return sorted({int(word) for word in words})


def parse_nics(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not 1 <= len(words) <= 2 or not all(words):
        raise BadOption(f"--nics: '{text}' is not one device, or one for each of the two ranks")
    return [words[0], words[-1]]


def check_range(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadOption(f"{option}: {value:g} is not between {low:g} and {high:g}")


def check_plot(plot: Path | None) -> None:
    if plot and plot.suffix not in (".png", ".svg"):
        raise BadOption(f"--plot: '{plot}' is not a .png or .svg file")
    if plot and not plot.absolute().parent.is_dir():
        raise BadOption(f"--plot: there is no folder {plot.absolute().parent}")


def size_name(length: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if length >= scale and length % scale == 0:
            return f"{length // scale} {unit}"
    return f"{length} B"
