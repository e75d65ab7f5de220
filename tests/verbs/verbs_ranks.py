"""Where the ranks of these tests sit: rank r has rails rxe(r % 2) and rxe(2 + r % 2)."""

import os
import time
from pathlib import Path

import jobs

ONE_RAIL, TWO_RAILS = 1, 2


def nics(rank, rails):
    return ",".join(f"rxe{2 * rail + rank % 2}" for rail in range(rails))


def connect(folder, rank, world_size, rails=ONE_RAIL, **options):
    """A communicator that can reach its peers over RDMA only."""
    os.environ["DICOMM_NICS"] = nics(rank, rails)
    os.environ["DICOMM_QP_TIMEOUT"] = "15"  # 134 ms, so that a rail without its cable fails in 1 s
    return jobs.connect(folder, rank, world_size, transport="verbs", **options)


def packets_sent(device):
    """Returns how many packets the device has sent by its own counter, independently of dicomm."""
    counters = Path("/sys/class/infiniband", device, "ports/1/hw_counters")
    lifespan_ms = int((counters / "lifespan").read_text())  # a reading is repeated for so long
    time.sleep(2 * lifespan_ms / 1e3)
    return int((counters / "sent_pkts").read_text())
