"""dicomm topo, as one would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import server_shapes

DEADLINE_S = 60


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dicomm", "topo", *arguments],
        env={"COLUMNS": "120", **os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "sys"
    root.mkdir()
    server_shapes.many_ports(root)
    return root


def test_what_it_prints(server):
    done = run("--sys-root", str(server))
    assert done.returncode == 0, done.stderr
    tree, table = done.stdout.split("its own NIC")
    for part in ("NUMA node 1 (CPUs 32-63)", "host bridge pci0000:10", "switch 0000:11:00.0",
                 "card at 0000:12:02.0", "chip 0000:13:00.0 NVIDIA",
                 "NIC mlx5_bond_0:1 net_mlx5_bond_0_1 Ethernet 200 Gb/s ACTIVE",
                 "NIC mlx5_2:1 net_mlx5_2_1 Ethernet 10 Gb/s DOWN"):  # fmt: skip
        assert part in tree
    rows = {row.split()[0]: row.split()[1:] for row in table.splitlines() if "0000:" in row}
    assert " ".join(rows["0000:14:00.0"]) == "mlx5_1:1 mlx5_0:1 same PCIe switch 4"


def test_json_and_picture(server, tmp_path):
    picture = tmp_path / "server.svg"
    done = run("--sys-root", str(server), "--json", "--plot", str(picture), DICOMM_NICS="mlx4_0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [nic["name"] for nic in found["nics"] if not nic["active"]] == ["mlx5_2:1", "mlx4_0:2"]
    assert found["numa_nodes"][0]["distances"] == {"0": 10, "1": 21}
    for chip in found["chips"]:
        (nic,) = chip["nics"]
        assert nic["name"] == "mlx4_0:1"
        assert chip["why"] == f"named by the job ({nic['nearness']})"
    assert {chip["nics"][0]["nearness"] for chip in found["chips"]} == {
        "across NUMA nodes",
        "same PCIe switch",
    }
    drawn = picture.read_text()
    for part in ("13:00.0", "mlx5_bond_0:1", "NUMA node 1 (CPUs 32-63)", "across NUMA nodes"):
        assert f"<!-- {part} -->" in drawn  # how matplotlib notes what a text says
    assert [file.name for file in tmp_path.iterdir() if "server" in file.name] == ["server.svg"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nics", "mlx5_9"], "NIC 'mlx5_9' is not on this node; its NICs are mlx5_0:1, "),
        (["--chip", "ff:00.0"], "chip 0000:ff:00.0 is not on this node's PCI; its chips are "),
        (["--plot", "server.gif"], "expected a file that ends in .png, .svg, .pdf"),
        (["--plot", "missing/server.png"], "there is no folder missing"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, server):
    done = run("--sys-root", str(server), *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1


def test_this_machine_and_help():
    assert run().returncode == 0
    shown = run("--help")
    assert "Examples:" in shown.stdout and "dicomm topo --sys-root" in shown.stdout
