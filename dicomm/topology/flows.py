"""How fast transfers are that go through a node at once: what they share, they share fairly.

The links of an emulated server; on a real one the hardware does this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicomm._dicomm import Nic, Topology


@dataclass(frozen=True)
class Speeds:
    """What sysfs does not say, each way."""

    chip_bytes_per_s: float  # a NIC reading or writing one chip's memory
    socket_bytes_per_s: float  # the link between two NUMA nodes


def route(
    topology: Topology, chip: str, nic: Nic, speeds: Speeds, outward: bool
) -> dict[str, float]:
    """Bytes per second of all that lies between a chip's memory and the wire, by name and way.

    outward: from the chip to the wire; else the other way.
    """
    from_chip, to_nic = topology.pci[chip].path, topology.pci[nic.pci_address].path
    nodes = topology.pci[chip].numa_node, topology.pci[nic.pci_address].numa_node
    shared = 0
    while from_chip[shared] == to_nic[shared]:
        shared += 1
    up, down = ("up", "down") if outward else ("down", "up")
    resources = {f"memory of {chip} {up}": speeds.chip_bytes_per_s}
    for path, way in ((from_chip, up), (to_nic, down)):
        # Every other step is inside a switch: its port towards the CPU to one away from it.
        for step in range(2, len(path), 2):
            if step >= shared:
                resources[f"link of {path[step]} {way}"] = topology.pci[path[step]].link_bytes_per_s
    if shared == 0 and nodes[0] != nodes[1]:
        a, b = nodes if outward else reversed(nodes)
        resources[f"NUMA node {a} to {b}"] = speeds.socket_bytes_per_s
    resources[f"wire of {nic.name} {'out' if outward else 'in'}"] = nic.bytes_per_s
    return resources


def fair_rates(routes: Sequence[Mapping[str, float]]) -> list[float]:
    """The max-min fair rate of a flow on each route, bytes per second.

    Each resource is shared evenly by the flows that nothing else holds back: the one with the
    least even share decides its flows' rates first, what they leave is shared by the others.
    """
    left = {name: capacity for its in routes for name, capacity in its.items()}
    users = {name: {i for i, its in enumerate(routes) if name in its} for name in left}
    rates = [0.0] * len(routes)
    while users:
        tightest = min(users, key=lambda name: left[name] / len(users[name]))
        share = left[tightest] / len(users[tightest])
        for flow in users[tightest].copy():
            rates[flow] = share
            for name in routes[flow]:
                left[name] -= share
                users[name].discard(flow)
        users = {name: flows for name, flows in users.items() if flows}
    return rates
