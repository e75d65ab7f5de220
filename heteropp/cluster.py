"""The cluster file: which chips there are, on which nodes, and what links them.

Ranks are numbered over the nodes in one canonical order, larger memory first (Observation #4),
then by chip name, region and switch, so that a plan does not depend on the order of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from heteropp.chips import ChipFileError, ChipSpec, load_chip
from heteropp.fabric import Fabric, FabricError, LinkEntry, Pipe
from heteropp.files import FileError, read_toml
from heteropp.presets import cluster_path

LARGEST = 100_000  # chips
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=63)]


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    """One [[nodes]] entry; its last four keys replace what the chip file says."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    chip: str
    count: Count = 1
    chips: Count | None = None  # in use on each node; absent: all that the chip's nodes have
    region: Name | None = None
    switch: Name | None = None
    nics: Count | None = None
    nic_bytes_per_s: Rate | None = None
    nic_latency_s: Seconds | None = None
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None  # measured on this cluster


@dataclass(frozen=True, kw_only=True)
class _File:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    nodes: Annotated[tuple[_Nodes, ...], Field(min_length=1)]
    links: tuple[LinkEntry, ...] = ()


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, as a message meets it when all chips of a node send."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Route:
    """The way of a message: every pipe carries it at once, and shares it with other messages."""

    latency_s: float
    pipes: tuple[Pipe, ...]


@dataclass(frozen=True)
class Node:
    chip_name: str  # as the cluster file gives it
    chip: ChipSpec  # its `links` are this node's
    ranks: range
    region: str = ""  # "" where the cluster file names none
    switch: str = ""

    @property
    def place(self) -> str:
        """What of the fabric the node hangs on."""
        return self.switch or self.region

    @property
    def nic_share_bytes_per_s(self) -> float:
        """What a chip gets when all of its node send at once."""
        links = self.chip.links
        return links.nic_bytes_per_s * min(1.0, links.nics_per_node / len(self.ranks))


@dataclass(frozen=True)
class Cluster:
    name: str
    nodes: tuple[Node, ...]
    fabric: Fabric = field(default_factory=Fabric)

    @property
    def world_size(self) -> int:
        return self.nodes[-1].ranks.stop

    def node(self, rank: int) -> Node:
        return self.nodes[self.node_index(rank)]

    def node_index(self, rank: int) -> int:
        """Which of `nodes` holds a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is not in cluster {self.name} of {self.world_size} ranks"
            )
        return bisect_right(self._first_ranks, rank) - 1

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [node.ranks.start for node in self.nodes]

    def chip(self, rank: int) -> ChipSpec:
        return self.node(rank).chip

    def link(self, source: int, destination: int) -> Link:
        """The node's own links, or the slowest of two NICs and the fabric between the nodes."""
        a, b = self.node(source), self.node(destination)
        if a is b:
            links = a.chip.links
            return Link(links.intra_node_latency_s, links.intra_node_bytes_per_s)
        nics = min(a.nic_share_bytes_per_s, b.nic_share_bytes_per_s)
        path = self.fabric.path(a.place, b.place)
        return Link(_nic_latency_s(a, b) + path.latency_s, min(nics, path.bytes_per_s))

    def route(self, source: int, destination: int) -> Route:
        """What a message passes from rank to rank, each pipe at its whole bandwidth.

        A chip's NIC is its own by affinity; chips share one where their node has fewer.
        """
        i, j = self.node_index(source), self.node_index(destination)
        a, b = self.nodes[i], self.nodes[j]
        if i == j:
            links = a.chip.links
            pipes = tuple(
                Pipe(f"rank {rank} {direction}", links.intra_node_bytes_per_s)
                for rank, direction in ((source, "out"), (destination, "in"))
            )
            return Route(links.intra_node_latency_s, pipes)
        path = self.fabric.path(a.place, b.place)
        out = Pipe(f"node {i} NIC {_nic(a, source)} out", a.chip.links.nic_bytes_per_s)
        in_ = Pipe(f"node {j} NIC {_nic(b, destination)} in", b.chip.links.nic_bytes_per_s)
        return Route(_nic_latency_s(a, b) + path.latency_s, (out, *path.pipes, in_))

    def chip_names(self) -> list[str]:
        """The chip types in rank order, each once."""
        return list(self._ranks_by_chip)

    def ranks_of(self, chip_name: str) -> list[int]:
        return list(self._ranks_by_chip.get(chip_name, ()))

    @cached_property
    def _ranks_by_chip(self) -> dict[str, list[int]]:
        result: dict[str, list[int]] = {}
        for node in self.nodes:
            result.setdefault(node.chip_name, []).extend(node.ranks)
        return result


def _nic_latency_s(a: Node, b: Node) -> float:
    return max(a.chip.links.nic_latency_s, b.chip.links.nic_latency_s)


def _nic(node: Node, rank: int) -> int:
    chips = len(node.ranks)
    return (rank - node.ranks.start) * min(node.chip.links.nics_per_node, chips) // chips


def read_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file, or a preset by name, and the chip files it names. Raises FileError."""
    path = cluster_path(path)
    file = read_toml(path, _File)
    entries = [
        (entry, _chip(entry, path, f"{path}: nodes[{index}]"))
        for index, entry in enumerate(file.nodes)
    ]
    _check_alike(path, entries)
    total = sum(entry.count * (entry.chips or chip.chips_per_node) for entry, chip in entries)
    if total > LARGEST:
        raise FileError(f"{path}: nodes: {total} chips in all; expected at most {LARGEST}")
    nodes: list[Node] = []
    first = 0
    for entry, chip in sorted(entries, key=_order):
        size = entry.chips or chip.chips_per_node
        for _ in range(entry.count):
            ranks = range(first, first + size)
            nodes.append(Node(entry.chip, chip, ranks, entry.region or "", entry.switch or ""))
            first += size
    try:
        fabric = Fabric.of([(e.region or "", e.switch or "") for e in file.nodes], file.links)
    except FabricError as error:
        raise FileError(f"{path}: {error}") from None
    return Cluster(file.name, tuple(nodes), fabric)


def _check_alike(path: Path, entries: list[tuple[_Nodes, ChipSpec]]) -> None:
    """Planners take the chips of one type for equally fast."""
    first: dict[str, tuple[int, float]] = {}
    for index, (entry, chip) in enumerate(entries):
        at, efficiency = first.setdefault(entry.chip, (index, chip.compute.efficiency))
        if efficiency != chip.compute.efficiency:
            raise FileError(
                f"{path}: nodes[{index}].efficiency makes it {chip.compute.efficiency:g} for chip "
                f"{entry.chip}, and nodes[{at}] has {efficiency:g}; expected one for the chip type"
            )


def _order(pair: tuple[_Nodes, ChipSpec]) -> tuple:
    entry, chip = pair
    links = chip.links
    return (
        -chip.memory.capacity_bytes,
        entry.chip,
        entry.region or "",
        entry.switch or "",
        -(entry.chips or chip.chips_per_node),
        (-links.nics_per_node, -links.nic_bytes_per_s, links.nic_latency_s),
    )


def _chip(entry: _Nodes, path: Path, where: str) -> ChipSpec:
    """The entry's chip, with the links that its nodes have."""
    beside = path.parent / entry.chip
    try:
        chip = load_chip(beside if entry.chip.endswith(".toml") else entry.chip)
    except ChipFileError as error:
        raise FileError(f"{where}.chip: {error}") from None
    if entry.chips is not None and entry.chips > chip.chips_per_node:
        raise FileError(
            f"{where}.chips is {entry.chips}; a node of chip {entry.chip} has {chip.chips_per_node}"
        )
    links = chip.links
    chip = replace(
        chip,
        links=replace(
            links,
            nics_per_node=entry.nics or links.nics_per_node,
            nic_bytes_per_s=entry.nic_bytes_per_s or links.nic_bytes_per_s,
            nic_latency_s=links.nic_latency_s
            if entry.nic_latency_s is None
            else entry.nic_latency_s,
        ),
    )
    if entry.efficiency is not None:
        chip = replace(chip, compute=replace(chip.compute, efficiency=entry.efficiency))
    return chip
