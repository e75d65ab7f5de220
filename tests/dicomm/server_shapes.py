"""Servers of real and of odd shapes, as sysfs trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dicomm.topology.sysfs_tree import ASPEED, DISPLAY, Port, SysfsTree

TWO_SOCKETS = [[10, 21], [21, 10]]
DOWN = Port(state="1: DOWN", rate="10 Gb/sec (4X SDR)")


def eight_chips(root: Path) -> None:
    """DGX-like: four switches, two chips and two NICs below each; a NIC for storage; a BMC."""
    tree = SysfsTree(root)
    tree.numa_nodes(TWO_SOCKETS)
    for number, bus in enumerate((0x15, 0x37, 0x97, 0xB7)):
        switch = tree.host_bridge(bus, numa_node=number // 2).switch()
        for k in range(2):
            switch.chip()
            switch.nic(f"mlx5_{2 * number + k}")
    storage = tree.host_bridge(0xD7, numa_node=1)
    storage.nic("mlx5_8", ports=[Port(rate="25 Gb/sec (1X EDR)")])
    storage.chip(class_code=DISPLAY, vendor=ASPEED)


def dgx_a100(root: Path) -> None:
    """Eight NUMA nodes; a switch's ports are switches again; NICs mlx5_4, 5, 10, 11 elsewhere."""
    tree = SysfsTree(root)
    near, far = (10, 12, 12, 12), (32, 32, 32, 32)
    rows = [[10 if a == b else near[1] if a // 4 == b // 4 else far[0] for b in range(8)]
            for a in range(8)]  # fmt: skip
    tree.numa_nodes(rows, cpus_per_node=16)
    nics = iter(f"mlx5_{number}" for number in range(12))
    for bus, numa_node, chips in (
        (0x00, 3, 2), (0x40, 1, 2), (0x60, 0, 0), (0x80, 7, 2), (0xB0, 5, 2), (0xE0, 4, 0)
    ):  # fmt: skip
        bridge = tree.host_bridge(bus, numa_node)
        if not chips:
            bridge.nic(next(nics), next(nics))
            continue
        switch = bridge.switch()
        for _ in range(chips):
            switch.switch().chip()
        for _ in range(2):
            switch.switch().nic(next(nics))


def sixteen_chips(root: Path) -> None:
    """DGX-2-like: a NIC and two chips below a switch, two such below another; NIC shared by two."""
    tree = SysfsTree(root)
    tree.numa_nodes(TWO_SOCKETS)
    names = iter(f"mlx5_{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9))
    for number, bus in enumerate((0x30, 0x58, 0xA8, 0xD8)):
        upper = tree.host_bridge(bus, numa_node=number // 2).switch()
        for _ in range(2):
            lower = upper.switch()
            lower.chip()
            lower.chip()
            lower.nic(next(names))
    tree.host_bridge(0x80, numa_node=1).nic("mlx5_4", "mlx5_5")


def none_near(root: Path) -> None:
    """All NICs on the socket without chips."""
    tree = SysfsTree(root)
    tree.numa_nodes(TWO_SOCKETS)
    for bus in (0x10, 0x30):
        switch = tree.host_bridge(bus, numa_node=0).switch()
        for _ in range(4):
            switch.chip()
    other = tree.host_bridge(0x90, numa_node=1)
    for number in range(3):
        other.nic(f"mlx5_{number}")


def no_nic(root: Path) -> None:
    tree = SysfsTree(root)
    tree.numa_nodes([[10]])
    tree.host_bridge(0x00, numa_node=0).chip()


def numa_split(root: Path) -> None:
    """Chips on both sockets, NICs on socket 0 only."""
    tree = SysfsTree(root)
    tree.numa_nodes(TWO_SOCKETS)
    for numa_node, bus in ((0, 0x10), (1, 0x90)):
        bridge = tree.host_bridge(bus, numa_node)
        for _ in range(4):
            bridge.chip()
    others = tree.host_bridge(0x50, numa_node=0)
    for number in range(2):
        others.nic(f"mlx5_{number}")


def many_ports(root: Path) -> None:
    """A card of two functions, a card with two ports of which one is down, a bond, a dead NIC."""
    tree = SysfsTree(root)
    tree.numa_nodes(TWO_SOCKETS)
    first, second = (tree.host_bridge(bus, node).switch() for node, bus in ((0, 0x10), (1, 0x90)))
    for switch in (first, second):
        switch.chip()
        switch.chip()
    first.nic("mlx5_0", "mlx5_1")
    first.nic("mlx5_2", ports=[DOWN])
    second.nic("mlx4_0", ports=[Port(), DOWN])
    second.nic("mlx5_bond_0", ports=[Port(rate="200 Gb/sec (4X HDR)")])


def container(root: Path) -> None:
    """No file tells of NUMA; a virtual machine's flat bus besides."""
    tree = SysfsTree(root)
    switch = tree.host_bridge(0x10, numa_node=None).switch()
    switch.chip()
    switch.nic("mlx5_0")
    flat = tree.host_bridge(0x80, numa_node=None)
    flat.chip()
    flat.nic("mlx5_1")
    tree.host_bridge(0x00, numa_node=None, domain=0x10000).chip()


def virtual_only(root: Path) -> None:
    """Chips and software RDMA: the NICs are on no bus."""
    tree = SysfsTree(root)
    tree.numa_nodes([[10]])
    bridge = tree.host_bridge(0x00, numa_node=-1)
    for _ in range(2):
        bridge.chip()
    for number in range(12):
        tree.virtual_nic(f"rxe{number}", f"eth{number}")


SHAPES: list[Callable[[Path], None]] = [
    eight_chips, dgx_a100, sixteen_chips, none_near, no_nic, numa_split, many_ports, container,
    virtual_only,
]  # fmt: skip
