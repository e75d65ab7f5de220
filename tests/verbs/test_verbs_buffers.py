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
import torch
import torch.distributed as dist
from ranks import Processes
from verbs_ranks import connect

PEERS = 6
MESSAGE_BYTES = 4000  # a slot each
WINDOW = 64  # slots that one sender may have out


@pytest.fixture(scope="module")
def without_shared_queues(tmp_path_factory):
    """A libibverbs by which devices have no shared queues, as some NICs."""
    folder = tmp_path_factory.mktemp("libibverbs")
    (folder / "versions").write_text("IBVERBS_1.1 { global: ibv_query_device; local: *; };")
    library = folder / "libibverbs-without-shared-queues.so"
    source = Path(__file__).with_name("without_shared_queues.c")
    versions = f"-Wl,--version-script={folder}/versions"
    command = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", versions, source]
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


def pinned_kib():
    return int(re.search(r"VmPin:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def pattern(sender, number):
    return np.random.default_rng((sender, number)).integers(0, 256, MESSAGE_BYTES, np.uint8)


def meet_one_by_one(rank, folder, library):
    """What rank 0 has pinned once it has exchanged a word with 1, 2, ... peers."""
    if library:
        os.environ["DICOMM_IBVERBS_LIBRARY"] = library
    pinned = []
    with connect(folder, rank, PEERS + 1, timeout_s=60) as communicator:
        word = bytearray(1)
        for peer in range(1, PEERS + 1) if rank == 0 else ():
            communicator.send(word, peer)
            communicator.recv(word, peer)
            pinned.append(pinned_kib())
        if rank > 0:
            communicator.recv(word, 0)
            communicator.send(word, 0)
    return pinned


def kib_a_peer(pinned):
    return (pinned[-1] - pinned[0]) / (len(pinned) - 1)


def test_a_peer_that_says_little_pins_little(tmp_path):
    pinned = jobs.run(PEERS + 1, meet_one_by_one, tmp_path, None)[0]
    assert pinned[0] > 500  # one whole window
    assert kib_a_peer(pinned) < 60


def test_devices_without_shared_queues_have_buffers_for_every_peer(tmp_path, without_shared_queues):
    pinned = jobs.run(PEERS + 1, meet_one_by_one, tmp_path, without_shared_queues)[0]
    assert 600 < kib_a_peer(pinned) < 800


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


def pattern_tensor(sender, number):
    return torch.from_numpy(pattern(sender, number))


def survive(rank, folder, victims):
    """Ranks 2, 3, ... send for ever until they are killed, rank 1 when it is asked to."""
    groups = {peer: dist.new_group([0, peer]) for peer in range(1, victims + 2)}
    if rank > 1:
        for number in range(1 << 30):
            dist.send(pattern_tensor(rank, number), 0, groups[rank])
    if rank == 1:
        for number in range(victims):
            dist.recv(torch.zeros(1), 0, groups[1])
            dist.send(pattern_tensor(1, number), 0, groups[1])
        jobs.wait_for_file(Path(folder, "go"))
        sends = [dist.isend(pattern_tensor(1, n), 0, groups[1]) for n in range(WINDOW)]
        for send in sends:
            send.wait()
        return
    received = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    alive, numbers, asked = set(range(2, victims + 2)), dict.fromkeys(groups, 0), 0
    while alive:
        for peer in sorted(alive):
            try:
                dist.recv(received, peer, groups[peer])
            except RuntimeError as error:
                assert f"rank {peer}" in str(error), error
                alive.remove(peer)
                dist.send(torch.zeros(1), 1, groups[1])
                dist.recv(received, 1, groups[1])
                assert torch.equal(received, pattern_tensor(1, asked)), asked
                asked += 1
                continue
            assert torch.equal(received, pattern_tensor(peer, numbers[peer])), (peer, numbers[peer])
            numbers[peer] += 1
        Path(folder, f"{len(alive)}-alive").touch()
    Path(folder, "alone").touch()
    for number in range(WINDOW):
        dist.recv(received, 1, groups[1])
        assert torch.equal(received, pattern_tensor(1, number)), number


def kill_senders(folder, victims):
    environment = {"DICOMM_TRANSPORT": "verbs", "DICOMM_NICS": "rxe0"}
    job = Processes(victims + 2, survive, folder, victims, environment=environment)
    try:
        for left in range(victims, 0, -1):
            jobs.wait_for_file(folder / f"{left}-alive")
            time.sleep(0.05 * np.random.default_rng(left).random())  # anywhere in a message
            job.processes[1 + left].kill()
        jobs.wait_for_file(folder / "alone")
        before = refusals()
        with stopped(job.processes[0].pid):
            (folder / "go").touch()
            time.sleep(1)
        # time for all that rank 1 may have out, and a device's reading is repeated for 10 ms
        assert refusals() == before, "rank 0 lacks buffers for one window"
    finally:
        outcomes = job.outcomes({0, 1})
    assert outcomes == {0: (True, None), 1: (True, None)}, outcomes


def test_who_is_killed_while_it_sends_takes_no_buffer_from_the_others(tmp_path):
    kill_senders(tmp_path, 8)


@pytest.mark.long
@pytest.mark.parametrize("round", range(5))
def test_fifty_are_killed(tmp_path, round):
    kill_senders(tmp_path, 10)
