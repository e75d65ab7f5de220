"""Machine 1 sends datagrams; machine 0 says how many came and how long their coming took."""

import os
import selectors
import socket
import time
from pathlib import Path

READY, DONE = Path("/share/ready"), Path("/share/done")
SENT, DATAGRAM_BYTES = 800, 1000
PORT = 4000
DEADLINE_S = 100


def wait_for(path):
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.02)


def receive():
    """Counts until the sender calls: its call comes after all that it sent before."""
    with (
        socket.socket(type=socket.SOCK_DGRAM) as receiver,
        socket.create_server(("", PORT)) as listener,
        selectors.DefaultSelector() as selector,
    ):
        receiver.bind(("", PORT))
        receiver.setblocking(False)
        selector.register(receiver, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        READY.touch()
        came, begin_s, last_s, called = 0, 0.0, 0.0, False
        while not called:
            ready = [key.fileobj for key, _ in selector.select(DEADLINE_S)]
            assert ready, "nothing came"
            called = listener in ready
            try:
                while True:
                    receiver.recv(DATAGRAM_BYTES)
                    last_s = time.monotonic()
                    begin_s = begin_s or last_s
                    came += 1
            except BlockingIOError:
                pass
        return came, last_s - begin_s


def send():
    wait_for(READY)
    with socket.socket(type=socket.SOCK_DGRAM) as sender:
        for _ in range(SENT):
            sender.sendto(bytes(DATAGRAM_BYTES), ("machine-0", PORT))
    with socket.create_connection(("machine-0", PORT), timeout=DEADLINE_S):
        wait_for(DONE)


if os.environ["HYPERHETERO_MACHINE"] == "0":
    print(*receive())
    DONE.touch()
else:
    send()
