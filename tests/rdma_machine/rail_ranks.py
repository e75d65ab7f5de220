"""One rank of a job of several machines, over RDMA alone; what came of it as a line of JSON.

The argument is the rank whose second rail is taken away.
"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import dicomm
import dicomm.distributed

RANK = int(os.environ["HYPERHETERO_MACHINE"])
ADDRESSES = os.environ["HYPERHETERO_MACHINES"].split(",")
WORLD = len(ADDRESSES)
TIMEOUT_S = 120
RAILS = ("rxe0", "rxe1")
SIZES = [0, 1, 8, 4097, 70_001, (1 << 20) + 3]
PIECES = [900] * 30 + [300_000] * 8
ELEMENTS = 1 << 16  # of 8 bytes


def packets_sent():
    """Returns how many packets each rail has sent by its own counter, independently of dicomm."""
    found = []
    for rail in RAILS:
        counters = Path("/sys/class/infiniband", rail, "ports/1/hw_counters")
        time.sleep(2 * int((counters / "lifespan").read_text()) / 1e3)
        found.append(int((counters / "sent_pkts").read_text()))
    return found


def pattern(length, *seed):
    return np.random.default_rng([length, *seed]).integers(0, 256, length, dtype=np.uint8)


def exchange_all(communicator):
    """Every size from everyone to everyone, all under way at once."""
    others = [peer for peer in range(WORLD) if peer != RANK]
    lanes = [(peer, size) for peer in others for size in SIZES]
    received = {lane: np.zeros(lane[1], np.uint8) for lane in lanes}
    requests = [communicator.irecv(received[p, s], p, tag=s) for p, s in lanes]
    sent = [pattern(size, RANK, peer) for peer, size in lanes]
    requests += [communicator.isend(d, p, tag=s) for d, (p, s) in zip(sent, lanes, strict=True)]
    for request in requests:
        request.wait()
    return all(np.array_equal(received[p, s], pattern(s, p, RANK)) for p, s in lanes)


def pass_around(communicator, broken):
    """Numbered pieces around the ring; the second rail of a rank goes down in their midst."""
    exact = True
    for number, size in enumerate(PIECES):
        received = np.zeros(size, np.uint8)
        request = communicator.isend(pattern(size, number, RANK), (RANK + 1) % WORLD)
        communicator.recv(received, before := (RANK - 1) % WORLD)
        request.wait()
        exact &= np.array_equal(received, pattern(size, number, before))
        if number == len(PIECES) // 4 and broken == RANK:
            subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
    return bool(exact)


def all_reduce():
    values = torch.arange(ELEMENTS, dtype=torch.int64) * (RANK + 1)
    dist.all_reduce(values)
    factor = WORLD * (WORLD + 1) // 2
    return torch.equal(values, torch.arange(ELEMENTS, dtype=torch.int64) * factor)


def links(communicator):
    return {peer: communicator.describe_link(peer) for peer in range(WORLD) if peer != RANK}


def main():
    os.environ["DICOMM_NICS"] = ",".join(RAILS)
    os.environ["DICOMM_TRANSPORT"] = "verbs"
    # 0.3 s, seven times: a machine that waits for a processor of this host is no failed rail.
    os.environ["DICOMM_QP_TIMEOUT"] = "16"
    torch.set_num_threads(1)
    said = {}
    store = dicomm.FileStore("/share/store")
    with dicomm.Communicator(RANK, WORLD, store, secret="s", timeout_s=TIMEOUT_S) as communicator:
        said["exchanged"] = exchange_all(communicator)
        said["links"] = links(communicator)
        dist.init_process_group(
            "dicomm",
            init_method="tcp://machine-0:29500",
            rank=RANK,
            world_size=WORLD,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        before = packets_sent()
        said["reduced"] = all_reduce()
        said["packets"] = [now - then for now, then in zip(packets_sent(), before, strict=True)]
        said["passed"] = pass_around(communicator, int(sys.argv[1]))
        said["links_after"] = links(communicator)
        said["reduced_after"] = all_reduce()
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
