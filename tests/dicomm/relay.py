"""Two ranks, and somebody on the way between them, who reads and changes what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import jobs

import dicomm

PAID, CHANGED = b"pay 1.00 to Ann", b"pay 9.99 to Bob"


def sent(ranks: list[dicomm.Communicator], message: bytes, sender: int = 0) -> bytes:
    """What the other rank receives of it."""
    request = ranks[1 - sender].irecv(buffer := bytearray(len(message)), sender)
    ranks[sender].send(message, 1 - sender)
    request.wait()
    return bytes(buffer)


def pays_bob(words: bytes) -> bytes:
    return words.replace(PAID, CHANGED)


class Relay:
    """Stands in a rank's place, and passes on what it gets, changed; all that it got it keeps."""

    def __init__(
        self, folder: Path, rank: int, change: Callable[[bytes], bytes] = pays_bob
    ) -> None:
        self._change = change
        words = jobs.contact(folder, rank)
        self._rank_at = words[4], int(words[5])
        self._door = socket.create_server(("127.0.0.1", 0))
        words[4:6] = map(str, self._door.getsockname())
        jobs.publish(folder, rank, words)
        self.seen = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            caller, _ = self._door.accept()
            callee = socket.create_connection(self._rank_at)
            for pair in ((caller, callee), (callee, caller)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while words := source.recv(1 << 20):
                self.seen += words
                sink.sendall(self._change(words))
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # a rank hung up, so the other one has to hear of it
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
