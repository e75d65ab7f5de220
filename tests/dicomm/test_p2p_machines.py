"""Ranks on machines of their own: where they are reached, and what shows that one has vanished."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from lab import lab
from machines import Machine

DEADLINE_S = 120


class Party:
    """Each script on its machine; what is left of them is killed."""

    def __init__(
        self,
        folder: Path,
        scripts: list[tuple[Machine, str]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.files = [folder / f"{i}.txt" for i in range(len(scripts))]
        self.processes = []
        for (machine, script), path in zip(scripts, self.files, strict=True):
            with path.open("w") as file:
                words = [sys.executable, "-u", "-c", script]
                self.processes.append(
                    machine.start(words, {**os.environ, **(environment or {})}, file)
                )

    def __enter__(self) -> Party:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_until_all_said(self, words: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all(words in text for text in self.said()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self) -> list[str]:
        return [path.read_text() for path in self.files]

    def all_said(self) -> list[str]:
        for process in self.processes:
            process.wait(DEADLINE_S)
        return self.said()


REDUCED = """
import torch, torch.distributed as dist
import dicomm.distributed
store = dist.TCPStore("10.77.0.1", 29511, 2, is_master={rank} == 0)
dist.init_process_group("dicomm", store=store, rank={rank}, world_size=2)
total = torch.full((3,), {rank} + 1.0)
dist.all_reduce(total)
print("the sum is", total.tolist())
dist.destroy_process_group()
"""


def test_ranks_are_reached_where_the_store_is_not_at_the_address_of_docker(tmp_path):
    with lab(2, tmp_path) as both:
        for machine in both:
            # As resolvers do that know every address of the host.
            machine.do(
                "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0;"
                "ip link set docker0 up; hostname docker-host;"
                "echo 172.17.0.1 docker-host >> /etc/hosts"
            )
        scripts = [(machine, REDUCED.format(rank=rank)) for rank, machine in enumerate(both)]
        with Party(tmp_path, scripts) as party:
            for text in party.all_said():
                assert "the sum is [3.0, 3.0, 3.0]" in text, text


CONNECT = """
import os, time
import dicomm
communicator = dicomm.Communicator(
    {rank}, 2, dicomm.FileStore({folder!r}), secret="s", name={name!r}, transport="tcp",
    timeout_s={timeout_s},
)
communicator.send(b"hello", 1 - {rank})
communicator.recv(bytearray(5), 1 - {rank})
print("met", flush=True)
"""

# Nothing is under way to the peer: only asking whether it lives can tell.
IDLE = """
try:
    communicator.recv(bytearray(1), 1 - {rank})
except dicomm.Error as error:
    print(type(error).__name__, error)
"""

# The kernel repeats what is not acknowledged.
BUSY = """
try:
    while True:
        communicator.{verb}(bytearray(1 << 20), 1 - {rank})
        time.sleep(0.01)
except dicomm.Error as error:
    print(type(error).__name__, error)
"""


def script(folder: Path, name: str, rank: int, rest: str, **values: object) -> str:
    values = {"folder": str(folder), "timeout_s": DEADLINE_S} | values
    return (CONNECT + rest).format(name=name, rank=rank, **values)


def meet(folder: Path, both: list[Machine], **environment: str) -> list[str]:
    """What ranks say that find each other in a folder, one on each machine."""
    name = f"met with {' '.join(environment)}"
    scripts = [(m, script(folder, name, rank, "", timeout_s=20)) for rank, m in enumerate(both)]
    with Party(folder, scripts, environment) as party:
        return party.all_said()


def test_ranks_whose_machines_have_neither_ipv4_nor_a_name_meet_over_ipv6(tmp_path):
    with lab(2, tmp_path) as both:
        for number, machine in enumerate(both):
            machine.do(
                "hostname nowhere; ip -4 address flush dev eth0;"
                f"ip -6 address add fd77::{number + 1}/64 dev eth0 nodad"
            )
        assert meet(tmp_path, both) == ["met\n"] * 2


def test_bridges_are_nobodys_address_where_there_is_another(tmp_path):
    with lab(2, tmp_path) as both:
        for machine in both:
            machine.do(
                "hostname nowhere; ip link set eth0 down; ip link set eth0 name eth9;"
                "ip link add docker0 index 99 type bridge; ip link set docker0 up;"
                "ip address add 172.17.0.1/16 dev docker0; ip link set eth9 up"
            )
        assert meet(tmp_path, both) == ["met\n"] * 2


def test_a_rank_listens_on_the_interface_that_it_is_told(tmp_path):
    with lab(2, tmp_path) as both:
        for machine in both:  # the way to everywhere is one that no other machine is on
            machine.do(
                "hostname nowhere; ip link add other0 type veth peer name other1;"
                "ip link set other0 up; ip link set other1 up;"
                "ip address add 10.99.0.1/24 dev other0; ip route add default dev other0"
            )
        for text in meet(tmp_path, both):
            assert "10.99.0.1" in text, text  # the address that was tried
        for variable, value in (
            ("DICOMM_SOCKET_IFNAME", "eth0"),
            ("DICOMM_SOCKET_IFNAME", "^other0,other1"),
            ("GLOO_SOCKET_IFNAME", "ib0,eth0"),
            ("NCCL_SOCKET_IFNAME", "et"),
            ("NCCL_SOCKET_IFNAME", "=eth0"),
        ):
            folder = tmp_path / f"{variable}={value}"
            folder.mkdir()
            assert meet(folder, both, **{variable: value}) == ["met\n"] * 2
        for value in ("eth", "ib7"):
            folder = tmp_path / value
            folder.mkdir()
            for text, machine in zip(
                meet(folder, both, DICOMM_SOCKET_IFNAME=value), both, strict=True
            ):
                (line,) = [line for line in text.splitlines() if "DICOMM_SOCKET_IFNAME" in line]
                assert f"DICOMM_SOCKET_IFNAME is {value}, and no network interface" in line
                assert f"expected one of lo, eth0 ({machine.address}), other0 (10.99.0.1)" in line


CHOSEN = """
import torch, torch.distributed as dist
import psutil
import dicomm.distributed
store = dist.TCPStore("10.77.0.1", 29511, 2, is_master={rank} == 0)
dist.init_process_group("dicomm", store=store, rank={rank}, world_size=2)
dist.all_reduce(torch.ones(3))
print({{each.laddr.ip for each in psutil.net_connections("tcp") if each.pid and not each.raddr}})
dist.destroy_process_group()
"""


def test_the_backend_of_torch_listens_there_too(tmp_path):
    with lab(2, tmp_path) as both:
        for machine in both:
            end = machine.address.rsplit(".", 1)[1]
            machine.switch.do(
                f"ip link add own{end} type veth peer name own0 netns {machine.namespaces.first};"
                f"ip link set own{end} master bridge up"
            )
            machine.do(f"ip link set own0 up; ip address add 10.78.0.{end}/24 dev own0")
        scripts = [(machine, CHOSEN.format(rank=rank)) for rank, machine in enumerate(both)]
        with Party(tmp_path, scripts, {"GLOO_SOCKET_IFNAME": "own0"}) as party:
            for rank, text in enumerate(party.all_said()):
                assert f"10.78.0.{rank + 1}" in text, text
                assert f"10.77.0.{rank + 1}" not in text, text


@pytest.mark.long
def test_a_machine_that_vanishes_is_named_and_one_that_is_away_for_5_s_is_not_missed(tmp_path):
    with lab(2, tmp_path) as (here, there):
        scripts = [
            (here, script(tmp_path, "idle", 0, IDLE)),
            (there, script(tmp_path, "idle", 1, IDLE)),
            (here, script(tmp_path, "busy", 0, BUSY, verb="send")),
            (there, script(tmp_path, "busy", 1, BUSY, verb="recv")),
        ]
        with Party(tmp_path, scripts) as party:
            party.wait_until_all_said("met")
            there.cut_off()
            time.sleep(5)
            there.come_back()
            time.sleep(5)
            assert party.said() == ["met\n"] * 4
            there.cut_off()
            for text, rank in zip(party.all_said(), [1, 0, 1, 0], strict=True):
                assert text.startswith("met\nPeerError") and f": rank {rank}, pid " in text, text
                assert "was lost (its TCP connection from 10.77.0." in text, text
                assert "got no answer for 30 s" in text, text


STOPPED = """
request = communicator.{verb}(bytearray(64 << 20), 1 - {rank})
print("under way", os.getpid())
request.wait()
print("done")
"""


@pytest.mark.long
def test_a_stopped_process_with_a_full_window_is_not_taken_for_a_vanished_machine(tmp_path):
    with lab(2, tmp_path) as (here, there):
        # Slow enough to be stopped in the midst of it.
        here.do("tc qdisc add dev eth0 root tbf rate 200mbit burst 256kb latency 50ms")
        scripts = [
            (here, script(tmp_path, "stopped", 0, STOPPED, verb="isend")),
            (there, script(tmp_path, "stopped", 1, STOPPED, verb="irecv")),
        ]
        with Party(tmp_path, scripts) as party:
            party.wait_until_all_said("under way")
            time.sleep(0.5)
            before = party.said()
            receiver = before[1].split()[-1]  # its number on its machine
            there.do(f"kill -STOP {receiver}")
            time.sleep(45)
            assert party.said() == before
            there.do(f"kill -CONT {receiver}")
            party.processes[1].send_signal(signal.SIGCONT)  # nsenter had stopped with it
            assert party.all_said() == [text + "done\n" for text in before]


# What a process reads of its namespaces is a folder that all machines share: for it they are one
# host, as clones of a virtual machine are.
CLONED = """
import os, subprocess
subprocess.run(["mount", "--bind", "{folder}", f"/proc/{{os.getpid()}}/ns"], check=True)
"""
SENT = """
request = communicator.isend(b"hello", 1 - {rank})
communicator.recv(buffer := bytearray(5), 1 - {rank})
request.wait()
print(buffer.decode())
"""


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_clones_of_one_machine_meet_over_tcp(tmp_path, transport):
    namespaces = tmp_path / "ns"
    namespaces.mkdir()
    for name in ("net", "pid", "user"):
        (namespaces / name).touch()
    cloned = CLONED.format(folder=namespaces)
    with lab(2, tmp_path) as both:
        scripts = []
        for rank, machine in enumerate(both):
            text = script(tmp_path, "cloned", rank, SENT, timeout_s=30)
            scripts.append((machine, cloned + text.replace('"tcp"', f'"{transport}"')))
        with Party(tmp_path, scripts) as party:
            for text in party.all_said():
                if transport == "auto":
                    assert text == "met\nhello\n"
                else:  # which is told instead of a hung-up call
                    assert "transport shm was asked for, but rank " in text, text
                    assert " is on another host (or in another container)" in text, text


AGAIN = """
message, count = bytearray(1), 0
while True:
    if {rank}:
        communicator.recv(message, 0)
        communicator.send(message, 0)
    else:
        communicator.send(message, 1)
        communicator.recv(message, 1)
        if (count := count + 1) % 100 == 0:
            print(count)
    time.sleep(0.001)
"""


@pytest.mark.long
def test_an_outage_costs_little_more_than_its_own_length(tmp_path):
    """The kernel's own pauses double: after 14 s the first call would come after 25 s."""
    with lab(2, tmp_path) as both:
        scripts = [(m, script(tmp_path, "away", rank, AGAIN)) for rank, m in enumerate(both)]
        with Party(tmp_path, scripts) as party:
            party.wait_until_all_said("met")

            def goes_on(within_s: float) -> bool:
                before = party.said()[0]
                deadline_s = time.monotonic() + within_s
                while (going := party.said()[0] == before) and time.monotonic() < deadline_s:
                    time.sleep(0.05)
                return not going

            assert goes_on(30)
            both[1].cut_off()
            time.sleep(12)
            assert not goes_on(2)
            both[1].come_back()
            assert goes_on(7)
