"""A topology as the tree one would draw: only what holds a chip or a NIC, ports left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from dicomm._dicomm import Nic, Topology

VENDORS = {
    0x1002: "AMD",
    0x10DE: "NVIDIA",
    0x19E5: "Huawei",
    0x1D0F: "Amazon",
    0x1DA3: "Habana",
    0x1ED5: "Moore Threads",
    0x8086: "Intel",
    0xCABC: "Cambricon",
}


@dataclass
class Box:
    """A place that holds others: a server, NUMA node, host bridge, switch, card; or no PCI."""

    kind: str
    name: str
    detail: str = ""
    boxes: list[Box] = field(default_factory=list)
    chips: list[str] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)

    @property
    def title(self) -> str:
        return " ".join(part for part in (self.kind, self.name, self.detail) if part)


def vendor_name(topology: Topology, chip: str) -> str:
    vendor = topology.pci[chip].vendor
    return VENDORS.get(vendor, f"vendor {vendor:04x}")


def outline(topology: Topology) -> Box:
    """The server as nested boxes, in order of PCI address."""
    server = Box("server", "")
    numa_nodes = {
        node.id: Box("NUMA node", str(node.id), f"(CPUs {node.cpus})" if node.cpus else "")
        for node in topology.numa_nodes
    }
    placed: dict[str, list[str]] = {
        address: topology.pci[address].path
        for address in {*topology.chips, *(nic.pci_address for nic in topology.nics)}
        if address
    }
    branches = _branches(list(placed.values()))
    boxes: dict[str, Box] = {}
    for address in sorted(placed):
        device = topology.pci[address]
        above = numa_nodes.get(device.numa_node)
        if above is None:  # one node, or unknown
            only = next(iter(numa_nodes.values())) if len(numa_nodes) == 1 else None
            above = only or numa_nodes.setdefault(-1, Box("NUMA node", "unknown"))
        for depth, name in enumerate(device.path[:-1]):
            if depth and name not in branches:
                continue
            if name not in boxes:
                boxes[name] = Box(_kind(depth, branches.get(name, set())), name)
                above.boxes.append(boxes[name])
            above = boxes[name]
        if address in topology.chips:
            above.chips.append(address)
        above.nics += [nic for nic in topology.nics if nic.pci_address == address]
    server.boxes += [box for _, box in sorted(numa_nodes.items()) if box.boxes or box.nics]
    if virtual := [nic for nic in topology.nics if not nic.pci_address]:
        server.boxes.append(Box("not on PCI", "", nics=virtual))
    return server


def _branches(paths: list[list[str]]) -> dict[str, set[str]]:
    """What is directly below every bridge below which paths part."""
    below: dict[str, set[str]] = {}
    for path in paths:
        for above, name in pairwise(path):
            below.setdefault(above, set()).add(name)
    return {name: names for name, names in below.items() if len(names) > 1}


def _kind(depth: int, below: set[str]) -> str:
    if depth == 0:
        return "host bridge"
    one_slot = len({name.split(".")[0] for name in below}) == 1
    return "card at" if one_slot else "switch"
