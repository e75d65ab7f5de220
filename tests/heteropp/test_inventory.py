"""heteropp-cluster: files from what is given, asked, or found on machines and in Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heteropp.description.cluster import read_cluster
from heteropp.inventory.product_names import chip_of

PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": None,
    "NVIDIA A100-PCIE-40GB": None,
    "NVIDIA A100X": None,
    "nvidia_a100_3g.20gb": None,
    "NVIDIA A10G": "a10g",
    "NVIDIA B200": "b200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": None,
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 144G HBM3e": None,
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": None,
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": None,
    "NVIDIA H800": "h800",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 2080 Ti": "rtx-2080-ti",
    "rtx2080ti": "rtx-2080-ti",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA TITAN RTX": "titan-rtx",
    "Tesla T4": "t4",
    "T4G": None,
    "NVIDIA T400 4GB": None,
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla V100S-PCIE-32GB": None,
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X OAM": "mi300x",
    "AMD Instinct MI300A": None,
    "910B3": "ascend-910b",
    "Ascend910B": "ascend-910b",
    "Ascend 910C": "ascend-910c",
    "MetaX C500": "metax-c500",
    "KUNLUN P800 OAM": "kunlun-p800",
    "MTT S4000": "mtt-s4000",
    "MTT S5000": "mtt-s5000",
    "HL-225B": "gaudi2",
    "HL-325L": "gaudi3",
    "MLU370-X8": "mlu370",
    "MLU370-S4": None,
    "MLU370-X4": None,
    "rtx_4090": "rtx-4090",
    "nvidia_h100_80gb_hbm3": "h100",
    "Matrox G200": None,
    "a": None,
}
NVIDIA_SMI = "\n".join(
    f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: GPU-{i}2b3f6c-0000)" for i in range(8)
)
NPU_SMI = """\
+----------------------------------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3347 / 65536         |
| 1     910B3               | OK            | 91.2        41                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3346 / 65536         |
"""
ROCM_SMI = """\

============================ ROCm System Management Interface ============================
====================================== Product Info ======================================
GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X OAM
GPU[0]\t\t: Card Model: \t\t0x74a1
GPU[0]\t\t: Card Vendor: \t\tAdvanced Micro Devices, Inc. [AMD/ATI]
GPU[0]\t\t: Card SKU: \t\tM3000100
GPU[0]\t\t: Subsystem ID: \t0x74a1
GPU[0]\t\t: Device Rev: \t\t0x00
GPU[0]\t\t: Node ID: \t\t2
GPU[0]\t\t: GUID: \t\t28851
GPU[0]\t\t: GFX Version: \t\tgfx942
GPU[1]\t\t: Card Series: \t\tAMD Instinct MI300X OAM
GPU[1]\t\t: Card Model: \t\t0x74a1
GPU[1]\t\t: Card Vendor: \t\tAdvanced Micro Devices, Inc. [AMD/ATI]
GPU[1]\t\t: Card SKU: \t\tM3000100
GPU[1]\t\t: Subsystem ID: \t0x74a1
GPU[1]\t\t: Device Rev: \t\t0x00
GPU[1]\t\t: Node ID: \t\t3
GPU[1]\t\t: GUID: \t\t51499
GPU[1]\t\t: GFX Version: \t\tgfx942
==========================================================================================
================================== End of ROCm SMI Log ===================================
"""
SLURM = """\
NodeName=gpu1 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.01
   RealMemory=1000 AllocMem=0 FreeMem=900 Sockets=2 Boards=1
   Gres=gpu:a100:8(S:0-1)
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1

NodeName=gpu2 Arch=x86_64 CoresPerSocket=32
   Gres=gpu:nvidia_h100_80gb_hbm3:4,shard:16
   State=IDLE

NodeName=login Arch=x86_64
   Gres=(null)
   State=IDLE
"""


def run(*arguments: str, folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs heteropp-cluster in a folder whose `bin`, if it is there, comes first in the PATH."""
    return subprocess.run(
        [sys.executable, "-m", "heteropp.cli.cluster", *arguments],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "150"},
    )


def machines_of(path: Path) -> list[tuple[str, str, int]]:
    cluster = read_cluster(path)
    return [(n.name, n.chip_name, len(n.ranks)) for n in cluster.nodes]


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """A program that answers in place of ssh what the file of a host's name says."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "answers").mkdir()
    program = tmp_path / "bin" / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        'while [ "$1" = -o ]; do shift 2; done\n'
        "grep -q nvidia-smi || exit 3\n"
        f'cat "{tmp_path}/answers/$1" 2>/dev/null || '
        '{ echo "ssh: Could not resolve hostname $1" >&2; exit 255; }\n'
    )
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_known_by_their_names(product: str) -> None:
    assert chip_of(product) == PRODUCTS[product]


def test_a_cluster_of_what_is_given(tmp_path: Path) -> None:
    given = ("--add", "2x8 a100", "--add", "1 x 4 ascend-910b")
    done = run("init", *given, "-o", "mine.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "20 chips in 3 nodes" in done.stdout
    found = [(chip, chips) for _, chip, chips in machines_of(tmp_path / "mine.toml")]
    assert sorted(found) == [("a100", 8), ("a100", 8), ("ascend-910b", 4)]
    shown = run("show", "mine.toml", folder=tmp_path)
    assert "312 TFLOPS" in shown.stdout and "2 x 8 = 16" in shown.stdout
    again = refused(run("init", *given, "-o", "mine.toml", folder=tmp_path))
    assert "mine.toml is there already" in again


def test_questions_and_their_answers(tmp_path: Path) -> None:
    answers = "a100\n2\n4\n2\n100\nh20\n1\n\n\n\n\n"
    done = run("init", folder=tmp_path, text=answers)
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert cluster.world_size == 16
    links = next(n for n in cluster.nodes if n.chip_name == "a100").chip.links
    assert (links.nics_per_node, links.nic_bytes_per_s) == (2, 12.5e9)


def test_machines_that_are_asked(ssh: Path) -> None:
    rates = "NIC 200 Gb/sec (4X HDR)\n" * 4 + "NIC 25 Gb/sec (1X EDR)\n"
    (ssh / "answers/gpu1").write_text(f"{NVIDIA_SMI}\n{rates}MemTotal:       2048 kB\n")
    (ssh / "answers/npu1").write_text(NPU_SMI)
    (ssh / "answers/login").write_text("")
    (ssh / "list").write_text("gpu1\nnpu1\n\nlogin\n")
    done = run("init", "--hosts", "list", folder=ssh)
    assert done.returncode == 0, done.stderr
    assert sorted(machines_of(ssh / "cluster.toml")) == [
        ("gpu1", "a100", 8),
        ("npu1", "ascend-910b", 2),
    ]
    asked = next(n for n in read_cluster(ssh / "cluster.toml").nodes if n.name == "gpu1")
    links = asked.chip.links
    assert asked.host_memory_bytes == 1 << 20
    assert (links.nics_per_node, links.nic_bytes_per_s) == (4, 25e9)


def test_an_amd_gpu_is_counted_once(ssh: Path) -> None:
    (ssh / "answers/amd1").write_text(ROCM_SMI)
    for chip in ((), ("--chip", "mi300x", "--force")):
        done = run("init", "--hosts", "amd1", *chip, folder=ssh)
        assert done.returncode == 0, done.stderr
        assert machines_of(ssh / "cluster.toml") == [("amd1", "mi300x", 2)]


def test_bytes_that_are_no_text_are_passed_over(ssh: Path) -> None:
    (ssh / "answers/gpu1").write_bytes(b"motd \xff\xfe\n" + NVIDIA_SMI.encode())
    done = run("init", "--hosts", "gpu1", folder=ssh)
    assert done.returncode == 0, done.stderr
    assert machines_of(ssh / "cluster.toml") == [("gpu1", "a100", 8)]


def test_a_list_of_hosts_may_be_longer_than_the_name_of_a_file(ssh: Path) -> None:
    names = [f"gpu-of-a-long-name-{n}" for n in range(20)]
    for host in names:
        (ssh / "answers" / host).write_text(NVIDIA_SMI)
    done = run("init", "--hosts", ",".join(names), folder=ssh)
    assert done.returncode == 0, done.stderr
    assert len(machines_of(ssh / "cluster.toml")) == 20


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    for name in ("prod[eu]", "x[/y]"):
        done = run("init", "--add", "1x1 a-mini", "--name", name, "--force", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"cluster {name}" in done.stdout


def test_machines_of_slurm(tmp_path: Path) -> None:
    done = run("init", "--slurm", "-", folder=tmp_path, text=SLURM)
    assert done.returncode == 0, done.stderr
    assert sorted(machines_of(tmp_path / "cluster.toml")) == [
        ("gpu1", "a100", 8),
        ("gpu2", "h100", 4),
    ]
    found = {n.name: n.host_memory_bytes for n in read_cluster(tmp_path / "cluster.toml").nodes}
    assert found == {"gpu1": 500 << 20, "gpu2": None}
    untyped = SLURM.replace("gpu:a100:8(S:0-1)", "gpu:8")
    done = run("init", "--slurm", "-", "--chip", "l40s", "--force", folder=tmp_path, text=untyped)
    assert done.returncode == 0, done.stderr
    assert ("gpu1", "l40s", 8) in machines_of(tmp_path / "cluster.toml")
    digits = SLURM.replace("gpu:a100:8(S:0-1)", "npu:910b:8")  # a type that begins as a number does
    done = run("init", "--slurm", "-", "--force", folder=tmp_path, text=digits)
    assert done.returncode == 0, done.stderr
    assert ("gpu1", "ascend-910b", 8) in machines_of(tmp_path / "cluster.toml")


def test_what_cannot_be_described_is_one_sentence(ssh: Path) -> None:
    (ssh / "answers/odd").write_text("GPU 0: NVIDIA T400 4GB (UUID: GPU-1)\n")
    (ssh / "answers/mixed").write_text(
        f"{NVIDIA_SMI}\nGPU 8: NVIDIA GeForce RTX 3090 (UUID: GPU-1)\n"
    )

    def init(*arguments: str, text: str = "") -> str:
        return refused(run("init", *arguments, folder=ssh, text=text))

    assert "'NVIDIA T400 4GB'" in init("--hosts", "odd")
    assert "8 of a100, 1 of rtx-3090" in init("--hosts", "mixed")
    assert "Could not resolve hostname absent" in init("--hosts", "absent")
    assert "--add is '8 a100'" in init("--add", "8 a100")
    assert "expected one of" in init("--add", "2x8 nix")
    assert "have 8 by its chip file" in init("--add", "2x9 a100")
    assert "no line begins with NodeName=" in init("--slurm", "-", text="hello")
    assert "chips of no named type" in init("--slurm", "-", text="NodeName=x\n Gres=gpu:8\n")
    assert "no machine with chips" in init("--slurm", "-", text="NodeName=x\n Gres=(null)\n")
    assert not (ssh / "cluster.toml").exists()
