"""Machine 1 sends datagrams, and says how long they took; machine 0 says how many came."""

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
    """Counts until the sender says so, behind all that it sent before."""
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
        sender = None
        came, told = 0, False
        while not told:
            ready = [key.fileobj for key, _ in selector.select(DEADLINE_S)]
            assert ready, "nothing came"
            told = sender in ready
            if listener in ready:
                sender, _ = listener.accept()
                selector.register(sender, selectors.EVENT_READ)
            try:
                while True:
                    receiver.recv(DATAGRAM_BYTES)
                    came += 1
            except BlockingIOError:
                pass
        return came


def call():
    """Connects; where every question for the other's hardware address was lost, once more."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection(("machine-0", PORT), timeout=DEADLINE_S)
        except OSError:
            assert time.monotonic() < deadline_s


def send():
    wait_for(READY)
    with call() as receiver, socket.socket(type=socket.SOCK_DGRAM) as sender:
        begin_s = time.monotonic()
        for _ in range(SENT):
            sender.sendto(bytes(DATAGRAM_BYTES), ("machine-0", PORT))
        receiver.sendall(b".")
        wait_for(DONE)
        return time.monotonic() - begin_s


if os.environ["HYPERHETERO_MACHINE"] == "0":
    print(receive())
    DONE.touch()
else:
    print(send())
