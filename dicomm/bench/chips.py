"""Chip files as the strategies' benchmark uses them: found, read, and played in slow motion.

In slow motion every duration is longer by one factor, and every speed lower by it, so that ratios
stay as they are while the host has time to keep up with the emulated chip.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicomm.bench.options import BadOption

TCP_FILE = Path(__file__).parent / "tcp.toml"
_NUMBER = re.compile(r"^(\s*)(\w+)(\s*=\s*)([0-9][0-9._eE+-]*)", re.MULTILINE)


@dataclass(frozen=True)
class ChipLink:
    """One way between two chips."""

    latency_s: float
    bytes_per_s: float

    def us(self, size_bytes: int) -> float:
        return 1e6 * (self.latency_s + size_bytes / self.bytes_per_s)

    def slowed(self, factor: float) -> ChipLink:
        return ChipLink(self.latency_s * factor, self.bytes_per_s / factor)


@dataclass(frozen=True)
class ChipFile:
    """nic: from the chip to another node's. host: a copy between the chip and host memory."""

    name: str
    text: str
    nic: ChipLink
    host: ChipLink

    def slowed(self, factor: float) -> str:
        """The same file with all its times and speeds in slow motion, told by the units that
        their names end in."""

        def rescale(match: re.Match[str]) -> str:
            indent, name, equals, number = match.groups()
            value = float(number.replace("_", ""))
            if name.endswith(("_per_s", "_flops")):
                return f"{indent}{name}{equals}{value / factor!r}"
            if name.endswith("_s"):
                return f"{indent}{name}{equals}{value * factor!r}"
            return match.group()

        return _NUMBER.sub(rescale, self.text)


def read_chip(name_or_path: str) -> ChipFile:
    """One of ditorch's presets, or any chip file. Raises BadOption."""
    path = Path(name_or_path)
    if re.fullmatch(r"[\w-]+", name_or_path):
        ditorch = importlib.util.find_spec("ditorch")  # only looks for it; dicomm needs no ditorch
        if not ditorch or not ditorch.submodule_search_locations:
            raise BadOption(f"--chips: chip '{name_or_path}' is ditorch's, which is not installed")
        presets = Path(ditorch.submodule_search_locations[0]) / "chips"
        path = presets / f"{name_or_path}.toml"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in presets.glob("*.toml")))
            raise BadOption(f"--chips: '{name_or_path}' is not one of {known}, nor a chip file")
    values = _read("--chips", path)
    links, compute = (_table("--chips", path, values, name) for name in ("links", "compute"))
    nic = _link("--chips", path, links, "nic_latency_s", "nic_bytes_per_s")
    host = _link("--chips", path, links | compute, "launch_s", "host_bytes_per_s")
    return ChipFile(values.get("chip_type", path.stem), path.read_text(), nic, host)


def read_tcp(path: Path) -> ChipLink:
    """The hosts' TCP/IP. Raises BadOption."""
    return _link("--tcp", path, _read("--tcp", path), "latency_s", "bytes_per_s")


def _read(option: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadOption(f"{option}: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadOption(f"{option}: {path} is not TOML: {error}") from None


def _table(option: str, path: Path, values: dict[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise BadOption(f"{option}: {path}: {name} is {table!r}, expected a table, [{name}]")
    return table


def _link(option: str, path: Path, values: dict[str, Any], latency: str, speed: str) -> ChipLink:
    for key in (latency, speed):
        value = values.get(key)
        if not isinstance(value, float | int) or isinstance(value, bool) or not value > 0:
            raise BadOption(f"{option}: {path}: {key} is {value!r}, expected a number above 0")
    return ChipLink(float(values[latency]), float(values[speed]))
