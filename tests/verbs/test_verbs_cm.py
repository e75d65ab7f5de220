"""How queue pairs are connected: by rdma_cm, or by exchange over the bootstrap."""

import os

import jobs
import numpy as np
import pytest
from verbs_ranks import TWO_RAILS, connect

import dicomm

NOWHERE = "librdmacm-of-nowhere.so"


def swap(communicator, peer, length):
    data, received = np.arange(length), np.zeros(length, int)
    sent = communicator.isend(data, peer)
    communicator.recv(received, peer)
    sent.wait()
    assert np.array_equal(received, data)


def exchange(rank, folder, wishes, libraries):
    """The way each rail was connected, or why none was."""
    if libraries[rank]:
        os.environ["DICOMM_RDMACM_LIBRARY"] = libraries[rank]
    options = {"rails": TWO_RAILS, "timeout_s": 10.0, "connect": wishes[rank]}
    try:
        with connect(folder, rank, 2, **options) as communicator:
            swap(communicator, 1 - rank, 1)
            rails = communicator.describe_link(1 - rank)["rails"]
            swap(communicator, 1 - rank, 200_000)
            return [rail["connect"] for rail in rails]
    except dicomm.Error as error:
        return str(error)


@pytest.mark.parametrize(
    ("wishes", "libraries", "way"),
    [
        (("", ""), ("", ""), "cm"),
        (("cm", "auto"), ("", ""), "cm"),
        (("auto", "cm"), ("", ""), "cm"),
        (("bootstrap", "auto"), ("", ""), "bootstrap"),
        (("auto", "auto"), (NOWHERE, ""), "bootstrap"),
    ],
)
def test_rdma_cm_connects_every_rail_where_both_sides_have_it(tmp_path, wishes, libraries, way):
    assert jobs.run(2, exchange, tmp_path, wishes, libraries) == [[way, way]] * 2


def test_who_insists_on_rdma_cm_is_told_what_is_missing(tmp_path):
    with jobs.Job(2, exchange, tmp_path / "library", ("cm", "auto"), (NOWHERE, "")) as job:
        assert f"connect 'cm' was asked for: cannot load librdmacm ({NOWHERE}" in job.result(0)
    with jobs.Job(2, exchange, tmp_path / "peer", ("cm", "bootstrap"), ("", "")) as job:
        told = job.result(0) + job.result(1)
    assert "has no rdma_cm, or is told not to use it" in told
