"""Which NICs chips get, on servers of many shapes, against brute force over the trees' folders."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import server_shapes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dicomm
from dicomm.topology import choose, discover, distance, nics_for, nics_named
from dicomm.topology.sysfs_tree import Below, Port, SysfsTree, write

CLASSES = ["same PCIe switch", "same host bridge", "same NUMA node", "across NUMA nodes",
           "anywhere"]  # fmt: skip


# --- the independent truth: folders only ---------------------------------------------------------


@cache
def folders(root: Path, address: str) -> tuple[str, ...]:
    """The names of the folders of a PCI device in sysfs, from its host bridge down to itself."""
    parts = (root / "bus/pci/devices" / address).resolve().relative_to(root / "devices").parts
    assert parts[0].startswith("pci")
    return parts


@cache
def numa_node(root: Path, address: str) -> int:
    file = root / "bus/pci/devices" / address / "numa_node"
    return int(file.read_text()) if file.exists() else -1


def true_nearness(root: Path, chip: str, nic: str) -> tuple[int, int]:
    """(class, what tells paths of the class apart)."""
    if not nic:
        return 4, 0
    a, b = folders(root, chip), folders(root, nic)
    shared = len([1 for x, y in zip(a, b, strict=False) if x == y])
    if shared > 1:
        return 0, len(a) + len(b) - 2 * shared
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"))
    from_node, to_node = numa_node(root, chip), numa_node(root, nic)
    if shared == 1 or len(nodes) <= 1 or from_node == to_node:
        return 1 if shared else 2, 0
    return 3, int((nodes[from_node] / "distance").read_text().split()[to_node])


@cache
def active_ports(root: Path) -> dict[str, tuple[str, float]]:
    """(PCI address or "", Gb/s) by name."""
    found = {}
    for state in root.glob("class/infiniband/*/ports/*/state"):
        if "ACTIVE" not in state.read_text():
            continue
        port = state.parent
        device = port.parent.parent
        link = device / "device"
        address = link.resolve().name if link.exists() else ""
        rate = float((port / "rate").read_text().split()[0])
        found[f"{device.name}:{port.name}"] = (address, rate)
    return found


def true_rails(root: Path, chip: str) -> set[str]:
    ports = active_ports(root)
    near = {name: true_nearness(root, chip, address) for name, (address, _) in ports.items()}
    best = {name for name in near if near[name] == min(near.values())}
    fastest = max((ports[name][1] for name in best), default=0)
    return {name for name in best if ports[name][1] == fastest}


def least_load(rails: dict[str, set[str]]) -> int:
    """How many chips the busiest NIC has at least: chips that have only these NICs over them."""
    sets = [frozenset(its) for its in rails.values() if its]
    return max(
        (-(-sum(its <= whole for its in sets) // len(whole)) for whole in set(sets)), default=0
    )


def check(root: Path) -> None:
    topology = discover(root)
    assert topology.chips == sorted(
        path.name
        for path in (root / "bus/pci/devices").iterdir()
        if re.match("0x(12|03)", (path / "class").read_text())
        and "1a03" not in (path / "vendor").read_text()
    )
    for chip in topology.chips:
        for nic in topology.nics:
            kind, apart = true_nearness(root, chip, nic.pci_address)
            its = distance(topology, chip, nic)
            assert CLASSES.index(its.nearness) == kind, (chip, nic)
            assert apart in (0, its.hops if kind == 0 else its.numa_distance), (chip, nic)
    rails = {chip: true_rails(root, chip) for chip in topology.chips}
    chosen = {chip: [nic.name for nic in nics_for(topology, chip, 64)] for chip in rails}
    assert {chip: set(names) for chip, names in chosen.items()} == rails
    load = Counter(names[0] for names in chosen.values() if names)
    assert max(load.values(), default=0) == least_load(rails)
    for chip, names in chosen.items():
        assert [nic.name for nic in nics_for(topology, chip)] == names[:8]
        assert [nic.name for nic in nics_for(discover(root), chip, 64)] == names


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", server_shapes.SHAPES, ids=lambda shape: shape.__name__)
def test_shape_against_brute_force(shape, tmp_path):
    shape(tmp_path)
    check(tmp_path)


RATES = ["100 Gb/sec (4X EDR)", "200 Gb/sec (4X HDR)"]
PORTS = st.builds(
    Port, state=st.sampled_from(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]), rate=st.sampled_from(RATES)
)
PLUGGED = st.recursive(
    st.one_of(st.just("chip"), st.lists(PORTS, min_size=1, max_size=2)),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)
SERVERS = st.lists(st.tuples(st.integers(0, 2), st.lists(PLUGGED, max_size=4)), max_size=5)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(bridges=SERVERS, virtual=st.integers(0, 2))
def test_any_tree_against_brute_force(bridges, virtual, tmp_path_factory):
    root = tmp_path_factory.mktemp("sys")
    tree = SysfsTree(root)
    tree.numa_nodes([[10, 12, 32], [12, 10, 32], [32, 32, 10]])
    names = iter(f"mlx5_{number}" for number in range(1000))

    def plug(place: Below, its: object) -> None:
        if its == "chip":
            place.chip()
        elif isinstance(its, list):
            place.nic(next(names), ports=its)
        elif isinstance(its, tuple):
            switch = place.switch()
            for inner in its:
                plug(switch, inner)

    for number, (node, plugged) in enumerate(bridges):
        bridge = tree.host_bridge(0, node, domain=number)  # which has room for any number of buses
        for its in plugged:
            plug(bridge, its)
    for number in range(virtual):
        tree.virtual_nic(f"rxe{number}", f"veth{number}")
    check(root)


def own_nics(root: Path) -> list[str]:
    return [choice.nics[0].name.removesuffix(":1") for choice in choose(discover(root))]


def test_chips_that_share_a_switch_spread_over_its_nics(tmp_path):
    server_shapes.eight_chips(tmp_path)
    assert own_nics(tmp_path) == [f"mlx5_{number}" for number in range(8)]


def test_dgx_a100(tmp_path):
    """The NICs near each pair of GPUs as `nvidia-smi topo -m` prints them on a DGX A100."""
    server_shapes.dgx_a100(tmp_path)
    topology = discover(tmp_path)
    near = {
        chip: {nic.name.removesuffix(":1") for nic in nics_for(topology, chip)}
        for chip in topology.chips
    }
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3), (6, 7), (6, 7), (8, 9), (8, 9)]
    assert list(near.values()) == [{f"mlx5_{number}" for number in pair} for pair in pairs]
    assert own_nics(tmp_path) == [f"mlx5_{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9)]


def test_two_chips_share_each_nic(tmp_path):
    """DGX-2: GPU 0 and 1 are nearer (PIX) to mlx5_0 than (PXB) to mlx5_1, and so on."""
    server_shapes.sixteen_chips(tmp_path)
    shared = [0, 0, 1, 1, 2, 2, 3, 3, 6, 6, 7, 7, 8, 8, 9, 9]
    assert own_nics(tmp_path) == [f"mlx5_{number}" for number in shared]


def test_chips_without_a_near_nic_share_the_far_ones_evenly(tmp_path):
    server_shapes.none_near(tmp_path)
    assert own_nics(tmp_path) == [f"mlx5_{number % 3}" for number in range(8)]
    for choice in choose(discover(tmp_path)):
        assert choice.why == "across NUMA nodes"
        assert [its.numa_distance for its in choice.distances] == [21] * 3


def test_far_chips_take_what_near_chips_leave(tmp_path):
    tree = SysfsTree(tmp_path)
    tree.numa_nodes([[10]])
    tree.host_bridge(0x00, 0).chip()  # first by address, but near to no NIC
    switch = tree.host_bridge(0x40, 0).switch()
    switch.nic("mlx5_0")
    switch.chip()
    tree.host_bridge(0x80, 0).nic("mlx5_1")
    assert own_nics(tmp_path) == ["mlx5_1", "mlx5_0"]


def test_ports_that_are_down_are_seen_and_not_used(tmp_path):
    server_shapes.many_ports(tmp_path)
    topology = discover(tmp_path)
    assert {nic.name: nic.state for nic in topology.nics if not nic.active} == {
        "mlx5_2:1": "DOWN",
        "mlx4_0:2": "DOWN",
    }
    assert [[nic.name for nic in choice.nics] for choice in choose(topology)] == [
        ["mlx5_0:1", "mlx5_1:1"],
        ["mlx5_1:1", "mlx5_0:1"],
        ["mlx5_bond_0:1"],  # twice as fast as mlx4_0 beside it
        ["mlx5_bond_0:1"],
    ]


def test_virtual_functions_are_not_rails_beside_their_card(tmp_path):
    tree = SysfsTree(tmp_path)
    switch = tree.host_bridge(0, 0).switch()
    switch.chip()
    switch.nic("mlx5_0", "mlx5_1", "mlx5_2", virtual=True)
    topology = discover(tmp_path)
    assert [nic.name for nic in nics_for(topology, topology.chips[0])] == ["mlx5_0:1"]
    write(tmp_path / "class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    topology = discover(tmp_path)  # as where a virtual machine has only a virtual function
    assert [nic.name for nic in nics_for(topology, topology.chips[0])] == ["mlx5_1:1", "mlx5_2:1"]


def test_what_a_nic_says_of_itself(tmp_path):
    server_shapes.many_ports(tmp_path)
    bond = next(nic for nic in discover(tmp_path).nics if nic.device == "mlx5_bond_0")
    assert (bond.port, bond.link_layer, bond.bytes_per_s) == (1, "Ethernet", 25e9)
    assert bond.network == "net_mlx5_bond_0_1"
    pci = discover(tmp_path).pci[bond.pci_address]
    assert pci.numa_node == 1
    assert pci.link_bytes_per_s == pytest.approx(32e9 * 16 / 8 * 128 / 130)


def test_hidden_numa_files_only_make_the_picture_coarser(tmp_path):
    server_shapes.container(tmp_path)
    topology = discover(tmp_path)
    assert topology.numa_nodes == []
    assert [choice.why for choice in choose(topology)] == [
        "same PCIe switch", "same host bridge", "same NUMA node"
    ]  # fmt: skip


def test_software_rdma_is_near_to_no_chip(tmp_path):
    server_shapes.virtual_only(tmp_path)
    topology = discover(tmp_path)
    assert [nic.network for nic in topology.nics] == [f"eth{number}" for number in range(12)]
    first, second = choose(topology)
    assert first.why == "anywhere"
    assert [nic.device for nic in first.nics] == [f"rxe{number}" for number in range(8)]
    assert second.nics[0].device == "rxe1"
    assert nics_for(topology, "")[0].device == "rxe2"  # a chip that is not on PCI either


def test_a_tree_without_rdma_or_pci(tmp_path):
    (tmp_path / "devices").mkdir()
    topology = discover(tmp_path)
    assert (topology.chips, topology.nics, topology.numa_nodes) == ([], [], [])
    assert nics_for(topology, "") == []


def test_this_machine():
    topology = discover()
    assert set(topology.chips) <= set(topology.pci)
    assert len(choose(topology)) == len(topology.chips)
    for nic in topology.nics:
        assert not nic.pci_address or nic.pci_address in topology.pci


# --- what the job says ---------------------------------------------------------------------------


def test_the_jobs_own_choice(tmp_path):
    server_shapes.many_ports(tmp_path)
    topology = discover(tmp_path)
    named = [nic.name for nic in nics_named(topology, "mlx4_0, mlx5_1:1,mlx5_0")]
    assert named == ["mlx4_0:1", "mlx5_1:1", "mlx5_0:1"]
    why = choose(topology, "mlx5_0,mlx5_bond_0")[0].why
    assert why == "named by the job (same PCIe switch, across NUMA nodes)"


@pytest.mark.parametrize(
    ("nics", "sentence"),
    [
        ("mlx5_7", r"NIC 'mlx5_7' is not on this node; its NICs are mlx5_0:1, mlx5_1:1, mlx5_2:1"),
        ("mlx5_0:2", r"NIC 'mlx5_0:2' is not on this node"),
        ("mlx5_0:one", r"NIC 'mlx5_0:one': expected device or device:port"),
        ("mlx5_2", r"NIC 'mlx5_2' cannot be used: mlx5_2:1 is DOWN"),
        ("mlx5_0,mlx5_0:1", r"NIC mlx5_0:1 is named twice"),
        ("mlx5_0,,mlx5_1", r"NIC '' is not on this node"),
        (" ", r"NIC '' is not on this node"),
    ],
)
def test_a_choice_that_cannot_be(nics, sentence, tmp_path):
    server_shapes.many_ports(tmp_path)
    with pytest.raises(dicomm.Error, match=sentence):
        nics_named(discover(tmp_path), nics)


def test_a_chip_the_job_names(tmp_path):
    server_shapes.eight_chips(tmp_path)
    bmc = next(a for a, device in discover(tmp_path).pci.items() if device.vendor == 0x1A03)
    assert bmc in discover(tmp_path, [bmc.removeprefix("0000:").upper()]).chips
    some = discover(tmp_path).chips[0]
    assert len(discover(tmp_path, ["0000" + some, some]).chips) == 8
    with pytest.raises(dicomm.Error, match=f"chip 0000:ff:00.0 is not on .* chips are {some}"):
        discover(tmp_path, ["ff:00.0"])
    with pytest.raises(dicomm.Error, match="chip 'gpu0' is not a PCI address such as"):
        nics_for(discover(tmp_path), "gpu0")


@pytest.mark.parametrize(
    ("file", "line", "sentence"),
    [
        ("bus/pci/devices/0000:01:00.0/numa_node", "near", "'near' is not a whole number"),
        ("bus/pci/devices/0000:01:00.0/current_link_speed", "fast", "is not a number of GT/s"),
        ("class/infiniband/mlx5_0/ports/1/rate", "100", "'100' is not a number of Gb/sec"),
        ("class/infiniband/mlx5_0/ports/x/state", "4: ACTIVE", "'x' is not a port number"),
        ("devices/system/node/online", "0-", "'0-' is not a list of numbers"),
    ],
)
def test_nonsense_is_one_sentence_with_the_file(file, line, sentence, tmp_path):
    tree = SysfsTree(tmp_path)
    bridge = tree.host_bridge(0, 0)
    bridge.chip()
    bridge.nic("mlx5_0")
    write(tmp_path / file, line)
    with pytest.raises(dicomm.Error, match=sentence) as raised:
        discover(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_not_a_sysfs_tree(tmp_path):
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(dicomm.Error, match="is not a sysfs tree"):
            discover(wrong)
