"""The buffers that slots are sent from and arrive in: what they cost, and that none is lost."""

import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import jobs
import numpy as np
import pytest
from verbs_ranks import connect

ROOT = Path(__file__).resolve().parents[2]
PEERS = 6
MESSAGE_BYTES = 4000  # a slot each
WINDOW = 64  # slots that one sender may have out
ONE_WINDOW_KIB = 80 * 8.4  # of receive buffers
LARGEST_QUEUE_KIB = 2048 * 8.4


@pytest.fixture(scope="module")
def without_shared_queues(tmp_path_factory):
    """A libibverbs by which devices have no shared queues, as some NICs."""
    folder = tmp_path_factory.mktemp("libibverbs")
    (folder / "versions").write_text("IBVERBS_1.1 { global: ibv_query_device; local: *; };")
    library = folder / "libibverbs-without-shared-queues.so"
    source = Path(__file__).with_name("without_shared_queues.c")
    versions = f"-Wl,--version-script={folder}/versions"
    command = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", versions, str(source)]
    subprocess.run([*command, "-Wl,--no-as-needed", "-libverbs", "-o", library], check=True)
    return str(library)


def refusals():
    """How often a device was told so far that its peer has no receive buffer."""
    counters = Path("/sys/class/infiniband").glob("rxe*/ports/1/hw_counters/rcvd_rnr_err")
    return sum(int(counter.read_text()) for counter in counters)


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pinned_kib(status):
    return int(re.findall(r"VmPin:\s*(\d+) kB", status)[0])


def pattern(sender, number):
    return np.random.default_rng((sender, number)).integers(0, 256, MESSAGE_BYTES, np.uint8)


def meet(rank, folder, library):
    """What rank 0 has pinned once it has exchanged a word with every peer."""
    if library:
        os.environ["DICOMM_IBVERBS_LIBRARY"] = library
    with connect(folder, rank, PEERS + 1, timeout_s=60) as communicator:
        word, peers = bytearray(1), range(1, PEERS + 1)
        if rank > 0:
            communicator.recv(word, 0)
            communicator.send(word, 0)
            communicator.recv(word, 0)
            return None
        for peer in peers:
            communicator.send(word, peer)
            communicator.recv(word, peer)
        pinned = pinned_kib(Path("/proc/self/status").read_text())
        for peer in peers:
            communicator.send(word, peer)
        return pinned


def test_a_peer_that_says_little_pins_little(tmp_path):
    pinned = jobs.run(PEERS + 1, meet, tmp_path, None)[0]
    assert ONE_WINDOW_KIB < pinned < 2 * ONE_WINDOW_KIB


def test_devices_without_shared_queues_have_a_window_for_every_peer(
    tmp_path, without_shared_queues
):
    assert jobs.run(PEERS + 1, meet, tmp_path, without_shared_queues)[0] > PEERS * 600


def all_to_rank_0(rank, folder, count, library):
    if library:
        os.environ["DICOMM_IBVERBS_LIBRARY"] = library
    with connect(folder, rank, PEERS + 1, timeout_s=120) as communicator:
        if rank > 0:
            communicator.send(b"!", 0)
            jobs.wait_for_file(Path(folder, "go"))
            sends = [communicator.isend(pattern(rank, number), 0) for number in range(count)]
            for send in sends:
                send.wait()
            return
        for peer in range(1, PEERS + 1):
            communicator.recv(bytearray(1), peer)
        Path(folder, "connected").touch()
        received = np.zeros(MESSAGE_BYTES, np.uint8)
        for number in range(count):
            for peer in range(1, PEERS + 1):
                communicator.recv(received, peer)
                assert np.array_equal(received, pattern(peer, number)), (peer, number)


def test_what_all_peers_send_at_once_arrives_though_buffers_run_out(tmp_path):
    with jobs.Job(PEERS + 1, all_to_rank_0, tmp_path, 3 * WINDOW, None) as job:
        jobs.wait_for_file(tmp_path / "connected")
        before = refusals()
        with stopped(job.processes[0].pid):
            (tmp_path / "go").touch()
            deadline = time.monotonic() + jobs.DEADLINE_S
            while refusals() == before:
                assert time.monotonic() < deadline, "rank 0 has buffers for everything"
                time.sleep(0.01)
        for rank in range(PEERS + 1):
            job.result(rank)


def test_it_arrives_over_devices_without_shared_queues(tmp_path, without_shared_queues):
    before = refusals()
    with jobs.Job(PEERS + 1, all_to_rank_0, tmp_path, 3 * WINDOW, without_shared_queues) as job:
        jobs.wait_for_file(tmp_path / "connected")
        (tmp_path / "go").touch()
        for rank in range(PEERS + 1):
            job.result(rank)
    assert refusals() == before  # there are buffers for all that each may send


@pytest.fixture(scope="module")
def killed_senders(tmp_path_factory):
    program = tmp_path_factory.mktemp("killed-senders") / "killed_senders"
    source, libraries = Path(__file__).with_name("killed_senders.cpp"), ROOT / "dicomm" / "lib"
    options = ["-std=c++20", f"-I{ROOT}/csrc/dicomm", "-o", program, source]
    options += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ldicomm"]
    subprocess.run(["g++", *options], check=True)
    return program


@pytest.mark.parametrize("killed", [8, pytest.param(50, marks=pytest.mark.long)])
def test_who_is_killed_while_it_sends_takes_no_buffer_from_the_others(
    tmp_path, killed_senders, killed
):
    size = killed + 2
    ranks = [
        subprocess.Popen([killed_senders, str(rank), str(size), tmp_path], stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=jobs.DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0] + [-signal.SIGKILL] * killed
    most_kib = min((killed + 1) * ONE_WINDOW_KIB, LARGEST_QUEUE_KIB)
    assert pinned_kib(told[0].decode()) < most_kib + 1000  # of what it sent, too
