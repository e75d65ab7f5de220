"""A cluster of the machines that were found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.fabric import Fabric

OFFLOADING = 1 / 2  # of a host's memory, at most: the rest is for rounding and for checkpoints


class InventoryError(ValueError):
    """Machines that cannot be described; the message is one sentence."""


@dataclass(frozen=True)
class Machine:
    """A node with chips of one type."""

    chip: str  # a preset's name, or the path of a chip file
    chips: int
    name: str = ""  # "" where it does not matter
    nics: int | None = None  # None: as the chip file has it
    nic_bytes_per_s: float | None = None  # of each, likewise
    memory_bytes: int | None = None  # the host's; None: not known


def cluster_of(name: str, machines: Sequence[Machine]) -> Cluster:
    """Returns the cluster. Raises InventoryError or ChipFileError."""
    if not machines:
        raise InventoryError(f"cluster {name} would have no machine with chips")
    twice = [own for own, count in Counter(m.name for m in machines if m.name).items() if count > 1]
    if twice:
        raise InventoryError(f"machine {twice[0]} stands there twice; expected each once")
    nodes = [_node(machine) for machine in machines]
    return Cluster(name, in_order(nodes), Fabric.of([("", "")], ()))


def _node(machine: Machine) -> Node:
    chip = load_chip(machine.chip)
    if not 1 <= machine.chips <= chip.chips_per_node:
        raise InventoryError(
            f"machine {machine.name or 'of ' + machine.chip} has {machine.chips} chips, and nodes "
            f"of chip {machine.chip} have {chip.chips_per_node} by its chip file; copy {chip.path} "
            "and change chips_per_node there"
        )
    return Node(
        machine.chip,
        _with_nics(chip, machine),
        range(machine.chips),
        name=machine.name,
        host_memory_bytes=machine.memory_bytes and int(OFFLOADING * machine.memory_bytes),
    )


def _with_nics(chip: ChipSpec, machine: Machine) -> ChipSpec:
    links = chip.links
    if min(1 if x is None else x for x in (machine.nics, machine.nic_bytes_per_s)) <= 0:
        raise InventoryError(
            f"a machine of {machine.chip} has {machine.nics} network cards of "
            f"{machine.nic_bytes_per_s} bytes a second; expected at least one that sends"
        )
    if machine.nics is not None:
        links = replace(links, nics_per_node=machine.nics)
    if machine.nic_bytes_per_s is not None:
        links = replace(links, nic_bytes_per_s=machine.nic_bytes_per_s)
    return replace(chip, links=links)
