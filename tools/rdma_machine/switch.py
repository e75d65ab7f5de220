"""Networks between guests: a connection to a network's socket is a port, a message is a frame."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence

FRAME_BYTES = 1 << 16  # no frame is longer
QUEUE_FRAMES = 4096  # for a port that is slow to take them; a switch drops what comes on top
TURN_FRAMES = 64  # of one port, before the others have theirs
ADDRESS_BYTES = 6


class Network:
    """A switch: it learns behind which port each address is, and floods what it does not know."""

    def __init__(self, selector: selectors.BaseSelector, path: str) -> None:
        self._selector = selector
        self._ports: set[Port] = set()
        self._learned: dict[bytes, Port] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(socket.SOMAXCONN)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        self._ports.add(Port(self._selector, self._listener.accept()[0], self))

    def forward(self, source: Port, frame: bytes) -> None:
        destination, sender = frame[:ADDRESS_BYTES], frame[ADDRESS_BYTES : 2 * ADDRESS_BYTES]
        self._learned[sender] = source
        known = self._learned.get(destination)
        for port in [known] if known else self._ports:
            if port is not source:
                port.send(frame)

    def forget(self, port: Port) -> None:
        self._ports.discard(port)
        self._learned = {to: at for to, at in self._learned.items() if at is not port}


class Port:
    def __init__(
        self, selector: selectors.BaseSelector, connection: socket.socket, network: Network
    ) -> None:
        connection.setblocking(False)
        self._selector, self._connection, self._network = selector, connection, network
        self._queue: deque[bytes] = deque()
        selector.register(connection, selectors.EVENT_READ, self._on_event)

    def send(self, frame: bytes) -> None:
        if self._queue:
            if len(self._queue) < QUEUE_FRAMES:
                self._queue.append(frame)
        elif not self._took(frame):
            self._queue.append(frame)
            self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _took(self, frame: bytes) -> bool:
        try:
            self._connection.send(frame)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the interface went down, and reading will say so; the frame is lost
        return True

    def _on_event(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            while self._queue and self._took(self._queue[0]):
                self._queue.popleft()
            if not self._queue:
                self._watch(selectors.EVENT_READ)
        if events & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        for _ in range(TURN_FRAMES):
            try:
                frame = self._connection.recv(FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:
                self._selector.unregister(self._connection)
                self._connection.close()
                self._network.forget(self)
                return
            self._network.forward(self, frame)

    def _watch(self, events: int) -> None:
        self._selector.modify(self._connection, events, self._on_event)


class Switch:
    def __init__(self, paths: Sequence[str]) -> None:
        """paths: where the networks' sockets will be, one for each network."""
        self._selector = selectors.DefaultSelector()
        for path in paths:
            Network(self._selector, path)

    def forward_for(self, seconds: float) -> None:
        """Forwards what arrives within so long."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            for key, events in self._selector.select(left_s):
                key.data(events)
