"""The cluster file: which chips there are, on which nodes, and what links them.

Ranks are numbered over the nodes in one canonical order, larger memory first (Observation #4),
then by chip name, so that a plan does not depend on the order of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from ditorch.chips import ChipFileError, ChipSpec, load_chip
from heteropp.files import FileError, read_toml

LARGEST = 100_000  # chips
Count = Annotated[int, Field(ge=1, le=1_000_000)]


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    """One [[nodes]] entry."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    chip: str
    count: Count = 1
    chips: Count | None = None  # in use on each node; absent: all that the chip's nodes have


@dataclass(frozen=True, kw_only=True)
class _File:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    nodes: Annotated[tuple[_Nodes, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Link:
    """One direction between two ranks."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Node:
    chip_name: str  # as the cluster file gives it
    chip: ChipSpec
    ranks: range


@dataclass(frozen=True)
class Cluster:
    name: str
    nodes: tuple[Node, ...]

    @property
    def world_size(self) -> int:
        return self.nodes[-1].ranks.stop

    def node(self, rank: int) -> Node:
        if not 0 <= rank < len(self._node_of):
            raise ValueError(
                f"rank {rank} is not in cluster {self.name} of {self.world_size} ranks"
            )
        return self._node_of[rank]

    @cached_property
    def _node_of(self) -> list[Node]:
        return [node for node in self.nodes for _ in node.ranks]

    def chip(self, rank: int) -> ChipSpec:
        return self.node(rank).chip

    def link(self, source: int, destination: int) -> Link:
        """What a message meets between two ranks: the node's own links, or the slower NIC."""
        a, b = self.node(source), self.node(destination)
        if a is b:
            links = a.chip.links
            return Link(links.intra_node_latency_s, links.intra_node_bytes_per_s)
        latency_s = max(a.chip.links.nic_latency_s, b.chip.links.nic_latency_s)
        return Link(latency_s, min(_nic_share(a), _nic_share(b)))

    def chip_names(self) -> list[str]:
        """The chip types in rank order, each once."""
        return list(dict.fromkeys(node.chip_name for node in self.nodes))

    def ranks_of(self, chip_name: str) -> list[int]:
        return [rank for node in self.nodes if node.chip_name == chip_name for rank in node.ranks]


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster file and the chip files it names. Raises FileError."""
    file = read_toml(path, _File)
    chips = {}
    for index, entry in enumerate(file.nodes):
        where = f"{path}: nodes[{index}]"
        chip = chips[entry.chip] = _load(entry.chip, path, where)
        if entry.chips is not None and entry.chips > chip.chips_per_node:
            raise FileError(
                f"{where}.chips is {entry.chips}; a node of chip {entry.chip} has "
                f"{chip.chips_per_node}"
            )
    total = sum(e.count * (e.chips or chips[e.chip].chips_per_node) for e in file.nodes)
    if total > LARGEST:
        raise FileError(f"{path}: nodes: {total} chips in all; expected at most {LARGEST}")
    order = sorted(
        file.nodes, key=lambda e: (-chips[e.chip].memory.capacity_bytes, e.chip, -(e.chips or 0))
    )
    nodes: list[Node] = []
    first = 0
    for entry in order:
        for _ in range(entry.count):
            size = entry.chips or chips[entry.chip].chips_per_node
            nodes.append(Node(entry.chip, chips[entry.chip], range(first, first + size)))
            first += size
    return Cluster(file.name, tuple(nodes))


def _load(chip: str, path: Path, where: str) -> ChipSpec:
    beside = path.parent / chip
    try:
        return load_chip(beside if chip.endswith(".toml") else chip)
    except ChipFileError as error:
        raise FileError(f"{where}.chip: {error}") from None


def _nic_share(node: Node) -> float:
    """Bytes per second a chip gets when all of its node send at once."""
    links = node.chip.links
    return links.nic_bytes_per_s * min(1.0, links.nics_per_node / len(node.ranks))
