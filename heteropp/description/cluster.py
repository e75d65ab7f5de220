"""The cluster file: which chips there are, on which nodes, and what links them.

Ranks are numbered over the nodes in one canonical order, larger memory first (Observation #4),
then by chip name, region and switch, so that a plan does not depend on the order of the file.

A rank is a place in one cluster; a member is a chip by its name, "a-0/1" for chip 1 of node "a-0",
which it keeps in the cluster of those that are left when others go.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field

from heteropp.description.chips import ChipFileError, ChipSpec, load_chip
from heteropp.description.fabric import Fabric, FabricError, LinkEntry, Pipe
from heteropp.description.files import FileError, read_toml
from heteropp.description.presets import cluster_path
from hyperhetero.input import listed

LARGEST = 100_000  # chips
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=63)]
NodeName = Annotated[str, Field(min_length=1, max_length=127, pattern="^[^/]*$")]
Chips = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    """One [[nodes]] entry; its last four keys replace what the chip file says."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    chip: str  # a chip preset's name, or a chip file's path (.toml), below this folder or absolute
    name: NodeName | None = None  # name of the node, where count is 1; absent: such as "a-0"
    count: Count = 1  # number of such nodes
    chips: Count | None = None  # number of chips in use on each node; absent: all it has
    in_use: Chips | None = None  # which chips of a node are in use, from 0, in place of `chips`
    region: Name | None = None  # region that the nodes are in; absent: one that has no name
    switch: Name | None = None  # switch that joins the nodes; absent: their region does
    host_memory_bytes: Bytes | None = None  # room for offloading in each host; absent: no limit
    nics: Count | None = None  # network cards in each node; absent: the chip file's number
    nic_bytes_per_s: Rate | None = None  # bandwidth of a card; absent: the chip file's
    nic_latency_s: Seconds | None = None  # latency between nodes; absent: the chip file's
    efficiency: Share | None = None  # measured share of the chip's peak; absent: the chip file's


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """What a cluster file says."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str  # the cluster's name
    nodes: Annotated[tuple[_Nodes, ...], Field(min_length=1)]  # the nodes, alike ones in one entry
    switches: tuple[Name, ...] = ()  # switches that links join and that have no nodes
    links: tuple[LinkEntry, ...] = ()  # what joins switches and regions


class Link(NamedTuple):
    """One direction between two ranks, as a message meets it when all chips of a node send."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """Returns the seconds that a message takes on the link when it is alone there."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Port(NamedTuple):
    """Where messages of a rank leave and enter its node."""

    node: int  # which of the cluster's
    nic: int  # which of the node's; by affinity


@dataclass(frozen=True)
class Route:
    """The way of a message: every pipe carries it at once, and shares it with other messages."""

    latency_s: float
    pipes: tuple[Pipe, ...]


@dataclass(frozen=True)
class Node:
    """Chips of one type in one machine, and their links."""

    chip_name: str  # as the cluster file gives it
    chip: ChipSpec  # its `links` are this node's
    ranks: range
    region: str = ""  # "" where the cluster file names none
    switch: str = ""
    name: str = ""  # "" where it is as Cluster.node_names has it
    in_use: tuple[int, ...] = ()  # which of its chips the ranks are; (): the first ones
    host_memory_bytes: int | None = None  # that offloading may fill; None: any amount

    @property
    def slots(self) -> tuple[int, ...]:
        """Which of the node's chips each rank is."""
        return self.in_use or tuple(range(len(self.ranks)))

    @property
    def place(self) -> str:
        """The place in the fabric that the node is attached to: its switch, or else its region."""
        return self.switch or self.region

    @property
    def nic_share_bytes_per_s(self) -> float:
        """The NIC bandwidth that each chip gets when all chips of the node send at once."""
        links = self.chip.links
        return links.nic_bytes_per_s * min(1.0, links.nics_per_node / len(self.ranks))


@dataclass(frozen=True)
class Cluster:
    """The nodes of a job, in the order of ranks, and the fabric between them."""

    name: str
    nodes: tuple[Node, ...]
    fabric: Fabric = field(default_factory=Fabric)

    def __hash__(self) -> int:
        """Looks at little, as it is asked for often; equality then compares all."""
        return hash((self.name, len(self.nodes), self.world_size))

    @property
    def world_size(self) -> int:
        """The number of chips, each of which is a rank."""
        return self.nodes[-1].ranks.stop

    def node(self, rank: int) -> Node:
        """Returns the node that holds a rank. Raises ValueError where there is none."""
        return self.nodes[self.node_index(rank)]

    def node_index(self, rank: int) -> int:
        """Which of `nodes` holds a rank."""
        if not 0 <= rank < len(self._ports):
            raise ValueError(
                f"rank {rank} is not in cluster {self.name} of {self.world_size} ranks"
            )
        return self._ports[rank].node

    @cached_property
    def _ports(self) -> list[Port]:
        """The ports of all ranks."""
        return [
            Port(index, _nic(node, rank))
            for index, node in enumerate(self.nodes)
            for rank in node.ranks
        ]

    def port(self, rank: int) -> Port:
        """Returns where the messages of one of the cluster's ranks leave and enter its node."""
        return self._ports[rank]

    @cached_property
    def node_kinds(self) -> tuple[int, ...]:
        """A number for each node, the same for nodes of which every message takes the same time."""
        seen: dict[tuple, int] = {}
        return tuple(
            seen.setdefault((n.chip_name, n.chip.links, self._place(n), len(n.ranks)), len(seen))
            for n in self.nodes
        )

    def _place(self, node: Node) -> str:
        """Returns where the way of a node's messages begins in the fabric."""
        return self.fabric.root(node.place)

    def chip(self, rank: int) -> ChipSpec:
        """Returns the chip of a rank. Raises ValueError where there is none."""
        return self.node(rank).chip

    @cached_property
    def capacity_bytes(self) -> tuple[int, ...]:
        """The memory of each rank's chip."""
        return tuple(
            node.chip.memory.capacity_bytes for node in self.nodes for _ in range(len(node.ranks))
        )

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
        (i, nic), (j, other_nic) = self._ports[source], self._ports[destination]
        a, b = self.nodes[i], self.nodes[j]
        if i == j:
            links = a.chip.links
            pipes = tuple(
                Pipe(f"rank {rank} {direction}", links.intra_node_bytes_per_s)
                for rank, direction in ((source, "out"), (destination, "in"))
            )
            return Route(links.intra_node_latency_s, pipes)
        path = self.fabric.path(a.place, b.place)
        out = Pipe(f"node {i} NIC {nic} out", a.chip.links.nic_bytes_per_s)
        in_ = Pipe(f"node {j} NIC {other_nic} in", b.chip.links.nic_bytes_per_s)
        return Route(_nic_latency_s(a, b) + path.latency_s, (out, *path.pipes, in_))

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names, in the order of `nodes`.

        Where the file names none, it is the chip's name with the first number that no other node
        has taken, such as "a-0".
        """
        taken = {node.name for node in self.nodes}
        numbers: dict[str, itertools.count[int]] = {}
        result = []
        for node in self.nodes:
            name, kind = node.name, Path(node.chip_name).name.removesuffix(".toml")
            free = (f"{kind}-{n}" for n in numbers.setdefault(kind, itertools.count()))
            result.append(name or next(name for name in free if name not in taken))
        return tuple(result)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The names of the chips, by rank."""
        return tuple(
            f"{name}/{slot}"
            for name, node in zip(self.node_names, self.nodes, strict=True)
            for slot in node.slots
        )

    def rank(self, member: str) -> int:
        """Where a member is here. Raises ValueError."""
        if member not in self._ranks_by_member:
            raise ValueError(f"{member} is not in cluster {self.name}")
        return self._ranks_by_member[member]

    @cached_property
    def _ranks_by_member(self) -> dict[str, int]:
        return {member: rank for rank, member in enumerate(self.members)}

    def kept(self, ranks: Iterable[int]) -> Cluster:
        """The cluster of some of its chips, under their old names and in an order of its own.

        A node keeps its NICs, and the links stay, whatever chips go. Rank r of the new cluster was
        self.rank(new.members[r]). Raises ValueError when none is kept or one is not there.
        """
        kept = sorted(set(ranks))
        if not kept:
            raise ValueError(f"none of the {self.world_size} chips of {self.name} is kept")
        nodes = []
        for index, held in itertools.groupby(kept, self.node_index):
            node, local = self.nodes[index], list(held)
            slots = tuple(node.slots[rank - node.ranks.start] for rank in local)
            nodes.append(
                replace(
                    node,
                    ranks=range(len(slots)),
                    name=self.node_names[index],
                    in_use=_unless_first(slots),
                )
            )
        fabric = Fabric.of(
            [(node.region, node.switch) for node in nodes],
            self.fabric.links,
            [place for link in self.fabric.links for place in link.between],
        )
        return replace(self, nodes=in_order(nodes), fabric=fabric)

    def chip_names(self) -> list[str]:
        """The chip types in rank order, each once."""
        return list(self._ranks_by_chip)

    def ranks_of(self, chip_name: str) -> list[int]:
        """Returns the ranks on chips of one type, in ascending order."""
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
    file = read_toml(path, ClusterFile)
    _check_names(path, file.nodes)
    entries = _entries(path, file.nodes)
    _check_alike(path, [node for _, node in entries])
    total = sum(entry.count * len(node.ranks) for entry, node in entries)
    if total > LARGEST:
        raise FileError(f"{path}: nodes: {total} chips in all; expected at most {LARGEST}")
    places = [(node.region, node.switch) for _, node in entries]
    try:
        fabric = Fabric.of(places, file.links, file.switches)
    except FabricError as error:
        raise FileError(f"{path}: {error}") from None
    nodes = (node for entry, node in entries for _ in range(entry.count))
    return Cluster(file.name, in_order(nodes), fabric)


def _entries(path: Path, given: Iterable[_Nodes]) -> list[tuple[_Nodes, Node]]:
    """The entries and what they are a node of. Raises FileError that names every wrong one."""
    entries, found = [], []
    for index, entry in enumerate(given):
        try:
            entries.append((entry, _node(entry, path, f"nodes[{index}]")))
        except FileError as error:
            found.append(str(error))
    if found:
        raise FileError(f"{path}: {listed(found)}")
    return entries


def outside(chip_name: str) -> str | None:
    """Says what is wrong with the path of a chip file that may lead out of the cluster's folder.

    A copy of the cluster keeps the path, and would put its copy of the chip file outside, too.
    """
    path = Path(chip_name)
    if not chip_name.endswith(".toml") or path.is_absolute() or ".." not in path.parts:
        return None
    return (
        f"chip {chip_name} has .. in its path; expected a path below the folder of the cluster "
        "file, or an absolute one"
    )


def _check_alike(path: Path, nodes: list[Node]) -> None:
    """Raises FileError where chips of one type differ, as planners take them for equally fast."""
    first: dict[str, tuple[int, float]] = {}
    for index, node in enumerate(nodes):
        own = node.chip.compute.efficiency
        at, efficiency = first.setdefault(node.chip_name, (index, own))
        if efficiency != own:
            raise FileError(
                f"{path}: nodes[{index}].efficiency makes it {own:g} for chip {node.chip_name}, "
                f"and nodes[{at}] has {efficiency:g}; expected one for the chip type"
            )


def _check_names(path: Path, entries: Iterable[_Nodes]) -> None:
    first: dict[str, int] = {}
    for index, entry in enumerate(entries):
        where = f"{path}: nodes[{index}]"
        if entry.name is None:
            continue
        if entry.count > 1:
            raise FileError(f"{where}.count is {entry.count}; expected 1 where `name` names one")
        if first.setdefault(entry.name, index) != index:
            raise FileError(
                f"{where}.name {entry.name!r} is that of nodes[{first[entry.name]}], too"
            )


def in_order(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes in canonical order, their ranks numbered over them."""
    result, first = [], 0
    for node in sorted(nodes, key=_order):
        result.append(replace(node, ranks=range(first, first + len(node.ranks))))
        first += len(node.ranks)
    return tuple(result)


def _order(node: Node) -> tuple:
    links = node.chip.links
    return (
        -node.chip.memory.capacity_bytes,
        node.chip_name,
        node.region,
        node.switch,
        -len(node.ranks),
        (-links.nics_per_node, -links.nic_bytes_per_s, links.nic_latency_s),
        (len(node.name), node.name),  # "a-2" before "a-10"
        node.in_use,
        node.host_memory_bytes or 0,
    )


def _node(entry: _Nodes, path: Path, where: str) -> Node:
    """One of the entry's nodes, its ranks not yet numbered."""
    chip = _chip(entry, path, where)
    for key, most in (("chips", entry.chips or 1), ("in_use", max(entry.in_use or (0,)) + 1)):
        if most > chip.chips_per_node:
            given = json.dumps(getattr(entry, key))
            raise FileError(
                f"{where}.{key} is {given}; a node of chip {entry.chip} has {chip.chips_per_node}"
            )
    in_use = entry.in_use or tuple(range(entry.chips or chip.chips_per_node))
    if entry.in_use and (entry.chips or in_use != tuple(sorted(set(in_use)))):
        raise FileError(
            f"{where}.in_use is {list(in_use)}; expected ascending numbers, and no `chips` beside"
        )
    return Node(
        chip_name=entry.chip,
        chip=chip,
        ranks=range(len(in_use)),
        region=entry.region or "",
        switch=entry.switch or "",
        name=entry.name or "",
        in_use=_unless_first(in_use),
        host_memory_bytes=entry.host_memory_bytes,
    )


def _unless_first(slots: tuple[int, ...]) -> tuple[int, ...]:
    return slots if slots != tuple(range(len(slots))) else ()


def _chip(entry: _Nodes, path: Path, where: str) -> ChipSpec:
    """The entry's chip, with the links that its nodes have."""
    if problem := outside(entry.chip):
        raise FileError(f"{where}.{problem}")
    beside = path.parent / entry.chip
    try:
        chip = load_chip(beside if entry.chip.endswith(".toml") else entry.chip)
    except ChipFileError as error:
        raise FileError(f"{where}.chip: {error}") from None
    given: dict[str, Any] = {"nics_per_node": entry.nics, "nic_bytes_per_s": entry.nic_bytes_per_s}
    given["nic_latency_s"] = entry.nic_latency_s
    own = {key: value for key, value in given.items() if value is not None}
    chip = replace(chip, links=replace(chip.links, **own))
    if entry.efficiency is not None:
        chip = chip.with_efficiency(entry.efficiency)
    return chip
