"""A rank that forks: the child has no part in the rank's connections."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import jobs
import pytest

import dicomm

# As a program of its own, so that the child ends as programs do: with atexit and destructors.
FORKING = """
import os, signal, sys
import dicomm

folder, transport, secret = sys.argv[1:]
store = dicomm.FileStore(folder)
rank = dicomm.Communicator(0, 2, store, secret=secret, transport=transport, timeout_s=20)
rank.send(b"x", 1)
rank.recv(bytearray(1), 1)
pending, queued = rank.irecv(bytearray(1), 1, tag=9), rank.isend(bytes(4 << 20), 1, tag=10)
if os.fork() == 0:
    def refused(use):
        try:
            use()
        except dicomm.Error as error:
            who = f"belongs to process {os.getppid()}, and this is process {os.getpid()}"
            assert who in str(error)
        else:
            raise AssertionError("it worked")

    refused(lambda: rank.send(b"x", 1))
    refused(lambda: rank.recv(bytearray(1), dicomm.ANY_SOURCE))
    refused(lambda: rank.isend(b"x", 1))
    refused(lambda: rank.irecv(bytearray(1), 1))
    refused(lambda: rank.describe_link(1))
    refused(pending.wait)
    refused(pending.test)
    del pending, queued
    rank.abort("in the child")
    own = [dicomm.Communicator(r, 2, store, secret=secret, name="own") for r in range(2)]
    request = own[0].irecv(bytearray(1), 1)
    own[1].send(b"x", 0)
    request.wait()
    sys.exit(7)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7
rank.send(b"after the child", 1)
pending.wait()
queued.wait()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    signal.pause()
rank.recv(bytearray(1), 1, tag=11)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_neither_ends_nor_prolongs_its_parents_connections(tmp_path, transport):
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    store = tmp_path / "store"
    store.mkdir()
    command = [sys.executable, program, store, transport, jobs.SECRET]
    with ExitStack() as opened:
        parent = opened.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        opened.callback(parent.kill)  # however the test ends, nothing is left to wait for
        communicator = opened.enter_context(jobs.connect(store, 1, 2, transport=transport))
        communicator.recv(bytearray(1), 0)
        communicator.send(b"x", 0)
        words = bytearray(20)
        assert communicator.recv(words, 0) == len(b"after the child")  # no goodbye came before
        communicator.send(b"x", 0, tag=9)
        assert communicator.recv(bytearray(4 << 20), 0, tag=10) == 4 << 20
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            for link in Path(f"/proc/{child}/fd").iterdir():
                assert int(link.name) <= 2 or "socket" not in os.readlink(link)
            assert "memfd:dicomm" not in Path(f"/proc/{child}/maps").read_text()
            parent.kill()
            parent.wait()
            with pytest.raises(dicomm.PeerError, match=rf"rank 0, pid {parent.pid} .*died"):
                communicator.recv(bytearray(1), 0, tag=12)
        finally:
            os.kill(child, signal.SIGKILL)
