"""Writes the sysfs tree of a server that is not at hand: folders, files and links as the kernel's.

    tree = SysfsTree(folder)
    tree.numa_nodes([[10, 21], [21, 10]])
    switch = tree.host_bridge(0x17, numa_node=0).switch()
    chip = switch.chip()
    switch.nic("mlx5_0")

PCI buses are numbered as the kernel finds them: a root port, a switch's port towards the CPU, its
ports away from it, a device below each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

BRIDGE, CHIP, ETHERNET, DISPLAY = 0x060400, 0x120000, 0x020000, 0x030000
INTEL, BROADCOM, NVIDIA, ASPEED, MELLANOX = 0x8086, 0x1000, 0x10DE, 0x1A03, 0x15B3


@dataclass(frozen=True)
class Port:
    """A NIC's port; rate and state as the kernel writes them."""

    state: str = "4: ACTIVE"
    rate: str = "100 Gb/sec (4X EDR)"
    link_layer: str = "Ethernet"


@dataclass(frozen=True)
class Link:
    """A PCIe link."""

    gt_per_s: float = 32.0
    lanes: int = 16


GEN5_X16 = Link()


class SysfsTree:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "devices").mkdir(parents=True)
        for folder in ("bus/pci/devices", "class/infiniband", "class/net"):
            (root / folder).mkdir(parents=True)

    def numa_nodes(self, distances: list[list[int]], cpus_per_node: int = 32) -> None:
        """distances: the kernel's table, a row a node; 10 is the node itself."""
        folder = self.root / "devices/system/node"
        for node, row in enumerate(distances):
            first = node * cpus_per_node
            write(folder / f"node{node}/distance", " ".join(map(str, row)))
            write(folder / f"node{node}/cpulist", f"{first}-{first + cpus_per_node - 1}")
        write(folder / "online", "0" if len(distances) == 1 else f"0-{len(distances) - 1}")

    def host_bridge(self, bus: int, numa_node: int | None = -1, domain: int = 0) -> HostBridge:
        """numa_node: what the files below say; None: there are no such files."""
        return HostBridge(self, domain, bus, numa_node)

    def virtual_nic(self, device: str, network: str, ports: list[Port] | None = None) -> None:
        """Software RDMA (rxe) over a network interface that is on no bus."""
        self.link_class("net", self.root / "devices/virtual/net" / network)
        folder = self.root / "devices/virtual/infiniband" / device
        write(folder / "parent", network)
        self._ports(folder, ports or [Port()], [network])

    def _ports(self, folder: Path, ports: list[Port], networks: list[str]) -> None:
        for number, port in enumerate(ports, start=1):
            its = folder / "ports" / str(number)
            for name in ("state", "rate", "link_layer"):
                write(its / name, getattr(port, name))
            if number <= len(networks):
                write(its / "gid_attrs/ndevs/0", networks[number - 1])
        self.link_class("infiniband", folder)

    def link_class(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        link_to(folder, self.root / "class" / name / folder.name)


class Below:
    """A place that devices can be plugged into: a host bridge or a switch."""

    def __init__(self, bridge: HostBridge, folder: Path, bus: int, first_port: int) -> None:
        self.bridge = bridge
        self._folder, self._bus = folder, bus
        self._port_numbers = count(first_port)

    def _slot(self, link: Link) -> tuple[Path, int]:
        """A new port, and the number of the bus below it."""
        number = next(self._port_numbers)
        port = self.bridge.device(self._folder, self._bus, number, 0, BRIDGE, INTEL, link)
        return port, self.bridge.next_bus()

    def switch(self, link: Link = GEN5_X16) -> Switch:
        """link: the switch's own, towards the CPU."""
        port, bus = self._slot(link)
        upstream = self.bridge.device(port, bus, 0, 0, BRIDGE, BROADCOM, link)
        return Switch(self.bridge, upstream, self.bridge.next_bus(), first_port=0)

    def chip(
        self,
        link: Link = GEN5_X16,
        class_code: int = CHIP,
        vendor: int = NVIDIA,
    ) -> str:
        """Adds a chip and returns its PCI address."""
        port, bus = self._slot(link)
        return self.bridge.device(port, bus, 0, 0, class_code, vendor, link).name

    def nic(
        self,
        *names: str,
        ports: list[Port] | None = None,
        link: Link = GEN5_X16,
        virtual: bool = False,
    ) -> str:
        """A card; of several names, each is a function of it. Returns its first PCI address.

        virtual: all names but the first are virtual functions of the first.
        """
        port, bus = self._slot(link)
        for function, name in enumerate(names):
            card = self.bridge.device(port, bus, 0, function, ETHERNET, MELLANOX, link)
            device = card / "infiniband" / name
            device.mkdir(parents=True)
            link_to(card, device / "device")
            if virtual and function:
                link_to(card.parent / self.bridge.address(bus, 0, 0), card / "physfn")
            its = ports or [Port()]
            networks = [f"net_{name}_{number}" for number in range(1, len(its) + 1)]
            for network in networks:
                self.bridge.tree.link_class("net", card / "net" / network)
            self.bridge.tree._ports(device, its, networks)
        return self.bridge.address(bus, 0, 0)


class Switch(Below):
    """A PCIe switch."""


class HostBridge(Below):
    """A root complex of a CPU."""

    def __init__(self, tree: SysfsTree, domain: int, bus: int, numa_node: int | None) -> None:
        self.tree, self.domain, self.numa_node = tree, domain, numa_node
        self._last_bus = bus
        folder = tree.root / "devices" / f"pci{domain:04x}:{bus:02x}"
        folder.mkdir()
        super().__init__(self, folder, bus, first_port=1)

    def next_bus(self) -> int:
        self._last_bus += 1
        return self._last_bus

    def address(self, bus: int, number: int, function: int) -> str:
        return f"{self.domain:04x}:{bus:02x}:{number:02x}.{function}"

    def device(
        self, above: Path, bus: int, number: int, function: int, code: int, vendor: int, its: Link
    ) -> Path:
        folder = above / self.address(bus, number, function)
        write(folder / "class", f"0x{code:06x}")
        write(folder / "vendor", f"0x{vendor:04x}")
        write(folder / "device", "0x0001")
        write(folder / "current_link_speed", f"{its.gt_per_s:.1f} GT/s PCIe")
        write(folder / "current_link_width", str(its.lanes))
        if self.numa_node is not None:
            write(folder / "numa_node", str(self.numa_node))
        link_to(folder, self.tree.root / "bus/pci/devices" / folder.name)
        return folder


def write(file: Path, line: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")


def link_to(target: Path, link: Path) -> None:
    """A relative link, as the kernel's."""
    link.symlink_to(os.path.relpath(target, link.parent))
