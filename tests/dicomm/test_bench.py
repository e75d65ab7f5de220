"""dicomm-bench, as a person or a machine runs it: real processes, few and small messages."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from dicomm.bench.cli import app

QUICK = ("--repeats", "1", "--round-s", "0.002")
ROW_KEYS = {"name", "unit", "ours", "peer", "peer_name", "ratio", "bar", "better"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dicomm.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )


def found(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The rows of the evidence."""
    done = run(*arguments, "--json", **environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"tool", "machine", "rows"}
    assert result["tool"] == f"dicomm-bench {arguments[0]}"
    assert "others took" in result["machine"]
    for row in result["rows"]:
        assert set(row) == ROW_KEYS
        assert row["better"] in ("lower", "higher")
        if row["ours"] is not None and row["peer"] is not None:
            assert row["ours"] > 0 and row["peer"] > 0
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"], rel=1e-3)
        else:
            assert row["ratio"] is None
    names = {row["name"]: row["ours"] for row in result["rows"]}
    assert 0 <= names["machine: CPU taken by others"] <= 100
    assert names["machine: a fixed piece of work, median over best"] >= 1
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def peers_named(rows: list[dict[str, Any]], name: str) -> set[str]:
    """Whom a figure of ours is held against; every one of them was measured."""
    return {row["peer_name"] for row in rows if row["name"] == name and row["peer"]}


def missing(rows: list[dict[str, Any]]) -> dict[str, str]:
    prefix = "missing: "
    return {
        row["name"].removeprefix(prefix): row["peer_name"]
        for row in rows
        if row["name"].startswith(prefix)
    }


def is_there(peer: str) -> bool:
    """Whether what a peer needs is installed; Open MPI's commands come without its headers, too."""
    if peer.startswith("UCX"):
        return shutil.which("ucx_perftest") is not None
    if peer == "Gloo":
        return True
    if not (shutil.which("mpirun") and shutil.which("mpicc")):
        return False
    command = ["mpicc", "-E", "-x", "c", "-"]
    done = subprocess.run(command, input="#include <mpi.h>", capture_output=True, text=True)
    if not peer.startswith("MPI over UCX"):
        return done.returncode == 0
    parts = subprocess.run(["ompi_info"], capture_output=True, text=True)
    return done.returncode == 0 and "pml: ucx" in parts.stdout


def test_p2p_holds_every_api_and_transport_against_the_peers_that_are_there(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "p2p.png"
    arguments = ("--sizes", "8,64K", "--transports", "shm,tcp", *QUICK, "--plot", str(picture))
    rows = found("p2p", *arguments)
    assert picture.read_bytes().startswith(b"\x89PNG")
    absent = missing(rows)
    for transport in ("shm", "tcp"):
        long_peers = {"Gloo", f"MPI {transport}", f"MPI over UCX {transport}"}
        peers = {
            *long_peers,
            f"UCX {transport}",
        }  # whose own program sends zeros where they are long
        for peer in peers:
            assert (peer in absent) != is_there(peer)
        for api in ("C++", "Python", "torch"):
            if f"dicomm {api} {transport}" in absent:
                continue
            for size, expected in (("8 B", peers), ("64 KiB", long_peers)):
                name = f"{transport} {api} {size}"
                assert peers_named(rows, name) == expected - set(absent)
                assert "Gloo" in peers_named(rows, f"{name}, p99")
            ratios = [
                row["peer"] / row["ours"]
                for row in rows
                if row["name"] in (f"{transport} {api} 8 B", f"{transport} {api} 64 KiB")
                and row["peer_name"] == "Gloo"
            ]
            mean_name = f"{transport} {api}: Gloo / dicomm, geometric mean"
            (mean,) = [row["ours"] for row in rows if row["name"] == mean_name]
            assert mean == pytest.approx(math.sqrt(math.prod(ratios)), rel=1e-2)
    tcp_bars = [row for row in rows if row["name"] == "tcp Python 8 B: dicomm / Gloo"]
    assert [row["bar"] for row in tcp_bars] == [1.0]


def test_peers_that_are_not_installed_are_said_to_be_absent() -> None:
    """The missing peers are named in the rows, and bandwidth is measured without them."""
    arguments = ("--sizes", "4K", "--transports", "shm", "--apis", "python", "--peers", "mpi,ucx")
    rows = found("bandwidth", *arguments, *QUICK, PATH="/nowhere")
    assert missing(rows) == {
        "MPI shm": "MPI shm: mpirun is not installed",
        "UCX shm": "UCX shm: ucx_perftest is not installed",
        "MPI over UCX shm": "MPI over UCX shm: mpirun is not installed",
    }
    for direction in ("one way", "both ways"):
        (row,) = [row for row in rows if row["name"] == f"shm Python 4 KiB {direction}"]
        assert row["ours"] > 0 and row["peer"] is None
        assert row["unit"] == "GB/s" and row["better"] == "higher"


def test_rate_as_a_table() -> None:
    arguments = ("--sizes", "8", "--transports", "shm", "--apis", "python", "--peers", "mpi")
    done = run("rate", *arguments, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "messages/s" in done.stdout and "8 B" in done.stdout
    assert "machine: " in done.stdout and "others took" in done.stdout


def test_collectives_all_of_them() -> None:
    rows = found("collectives", "--sizes", "1K", "--ranks", "3", *QUICK)
    peers = {peer for peer in ("Gloo", "MPI shm") if is_there(peer)}
    for operation in (
        "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "gather",
        "scatter",
    ):  # fmt: skip
        assert peers_named(rows, f"3 ranks, shm torch: {operation} 1 KiB") == peers
    assert peers_named(rows, "3 ranks, shm torch: barrier") == peers
    bars = {row["name"]: row["bar"] for row in rows if row["bar"] is not None}
    assert bars["3 ranks, torch: allreduce 1 KiB: Gloo / dicomm"] == 1.0


def test_device_direct_is_faster_than_cpu_mediated_on_emulated_chips() -> None:
    arguments = ("--sizes", "256,64K", "--repeats", "1", "--slow-motion", "200")
    rows = found("device", *arguments)
    by_name = {row["name"]: row for row in rows}
    for size, size_bytes in (("256 B", 256), ("64 KiB", 65536)):
        row = by_name[f"{size}, device-direct"]
        # Nothing is faster than the chip files' NIC, than two copies' launches, and tcp.toml's TCP.
        assert row["ours"] >= 5 + size_bytes / 25e3
        assert row["peer"] >= 2 * 5 + 30 + size_bytes / 5.25e3
        ratio = by_name[f"{size}: CPU-mediated / device-direct"]["ours"]
        assert ratio == pytest.approx(row["peer"] / row["ours"], rel=1e-3)
    mean = by_name["mean ratio: CPU-mediated / device-direct"]
    assert mean["ours"] > 1 and mean["peer"] == 9.94 and "H2 paper" in mean["peer_name"]
    assert 0 < by_name["pacing fidelity, of the worst size"]["ours"] <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("p2p --sizes 8,tiny", "'tiny' is not a size"),
        ("p2p --sizes -8", "is not a size"),
        ("p2p --sizes 0", "'0' is not a size"),
        ("p2p --sizes 9G", "'9G' is not a size"),
        ("p2p --sizes ,", "is not a size"),
        ("p2p --transports shm,pigeon", "'pigeon' is not one of shm, tcp, verbs"),
        ("p2p --apis rust", "'rust' is not one of c++, python, torch"),
        ("p2p --peers nccl", "'nccl' is not one of gloo, mpi, ucx, perftest"),
        ("p2p --nics a,b,c", "not one device, or one for each"),
        ("p2p --repeats 0", "0 is not between 1 and 1000"),
        ("p2p --round-s 0", "0 is not between 0.001 and 60"),
        ("p2p --plot p2p.gif", "is not a .png or .svg"),
        ("p2p --plot /nowhere/p2p.png", "there is no folder /nowhere"),
        ("bandwidth --sizes 1X", "'1X' is not a size"),
        ("rate --peers gloop", "'gloop' is not one of"),
        ("collectives --ranks 1", "'1' is not a number of ranks"),
        ("collectives --operations allswap", "'allswap' is not one of allreduce"),
        ("collectives --transport verbs", "'verbs' is not one of shm, tcp"),
        ("collectives --transport shm,tcp", "'shm,tcp' is not one of shm, tcp"),
        ("device --chips a", "'a' is not two chips"),
        ("device --chips a,z", "'z' is not one of a, a-mini"),
        ("device --chips a,/nowhere.toml", "/nowhere.toml cannot be read"),
        ("device --tcp /nowhere.toml", "/nowhere.toml cannot be read"),
        ("device --slow-motion 0.5", "0.5 is not between 1 and 10000"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_code_2(arguments: str, words: str) -> None:
    done = run_command(app, arguments.split())
    assert done.exit_code == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_verbs_needs_a_device() -> None:
    if Path("/sys/class/infiniband").is_dir():
        options = ["--transports", "verbs", "--nics", "nothing0"]
        words = "'nothing0' is not one of"
    else:
        options, words = ["--transports", "verbs"], "verbs needs an RDMA device"
    done = run_command(app, ["p2p", *options])
    assert done.exit_code == 2 and words in done.stderr


def test_files_of_chips_and_tcp_are_checked(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    for text, words in (
        ("latency_s = 1", "bytes_per_s is None, expected a number above 0"),
        ("latency_s = -1\nbytes_per_s = 1", "latency_s is -1"),
        ("latency_s =", "is not TOML"),
    ):
        bad.write_text(text)
        done = run_command(app, ["device", "--tcp", str(bad)])
        assert done.exit_code == 2 and words in done.stderr and str(bad) in done.stderr
    for table in ("links", "compute"):
        bad.write_text(f"{table} = 3")
        done = run_command(app, ["device", "--chips", f"{bad},a"])
        assert done.exit_code == 2 and str(bad) in done.stderr
        assert f"{table} is 3, expected a table, [{table}]" in done.stderr


@pytest.mark.parametrize("command", ["p2p", "bandwidth", "rate", "collectives", "device"])
def test_help_has_examples(command: str) -> None:
    done = run_command(app, [command, "--help"])
    assert done.exit_code == 0
    assert f"dicomm-bench {command} --" in " ".join(done.stdout.split())
