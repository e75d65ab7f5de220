"""Strangers: a process that keeps connections open to the ports of a job that it is no part of.

A fifth each is silent, drips one byte after the other, talks garbage, says hello and falls silent,
or replays a recorded handshake, whose proof was good for another connection. Who is hung up on
calls again.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import resource
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

Address = tuple[str, int]

MAGIC = b"dicommhs"
HELLO_BYTES, CARD = 224, bytes(528)
DRIPS_PER_S = 200  # bytes, of all strangers together
TURN_S = 0.02


def hello() -> bytes:
    words = struct.pack("<8s6i32s32s", MAGIC, 2, 1, 0, 6, 7, 0, bytes(32), os.urandom(32))
    return words.ljust(HELLO_BYTES, b"\0")


def recorded(address: Address, secret: bytes) -> bytes:
    """What a rank would have said on a connection that ended; a mere hello where nobody answers."""
    mine = hello()
    try:
        with socket.create_connection(address, timeout=5) as caller:
            caller.sendall(mine)
            theirs = caller.recv(HELLO_BYTES, socket.MSG_WAITALL)
    except OSError:
        return mine
    return mine + CARD + hmac.digest(secret, b"dialler" + mine + theirs + CARD, "sha256")


@dataclass
class Caller:
    address: Address
    words: Callable[[], bytes]
    drips: bool
    socket: socket.socket | None = None

    def call(self) -> None:
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.setblocking(False)
        self.socket.connect_ex(self.address)

    def say(self, words: bytes) -> bool:
        """Sends the words; returns False if the other side has closed the connection."""
        assert self.socket
        try:
            self.socket.send(words)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        if self.socket:
            self.socket.close()
            self.socket = None


def callers(addresses: list[Address], count: int, secret: bytes) -> Iterator[Caller]:
    with ThreadPoolExecutor(len(addresses)) as threads:  # who never answers takes the whole timeout
        answers = threads.map(lambda address: recorded(address, secret), addresses)
        records = dict(zip(addresses, answers, strict=True))
    for i in range(count):
        address = addresses[i % len(addresses)]
        kind = i // len(addresses) % 5
        words: list[Callable[[], bytes]] = [
            lambda: b"",
            lambda: MAGIC[:3],
            lambda: os.urandom(random.randrange(1, 2000)),
            hello,
            lambda record=records[address]: record,
        ]
        yield Caller(address, words[kind], drips=kind == 1)


class Crowd:
    def __init__(self, everyone: list[Caller], calls_per_s: float) -> None:
        self.everyone, self.calls_per_s = everyone, calls_per_s
        self.calls = 0
        self.selector = selectors.DefaultSelector()

    def call_again(self, until_s: float) -> None:
        """Reconnects callers whose connection was closed, within the rate of calls_per_s.

        until_s: the seconds since the start, by which calls may number until_s * calls_per_s.
        """
        for caller in self.everyone:
            if caller.socket:
                continue
            if self.calls >= until_s * self.calls_per_s:
                return
            caller.call()
            assert caller.socket
            self.selector.register(caller.socket, selectors.EVENT_WRITE, caller)
            self.calls += 1

    def listen(self) -> None:
        for key, events in self.selector.select(TURN_S):
            caller: Caller = key.data
            if events & selectors.EVENT_WRITE:  # connected, or refused
                self.selector.modify(caller.socket, selectors.EVENT_READ, caller)
                alive = caller.say(caller.words()) if caller.words() else True
            else:
                alive = self.hear(caller)
            if not alive:
                self.part(caller)

    def hear(self, caller: Caller) -> bool:
        assert caller.socket
        try:
            return bool(caller.socket.recv(4096))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def drip(self) -> None:
        drippers = [each for each in self.everyone if each.drips and each.socket]
        for caller in random.sample(drippers, min(len(drippers), int(DRIPS_PER_S * TURN_S))):
            if not caller.say(b"\0"):
                self.part(caller)

    def part(self, caller: Caller) -> None:
        if caller.socket:
            self.selector.unregister(caller.socket)
            caller.hang_up()

    def leave(self) -> None:
        for caller in self.everyone:
            self.part(caller)


def main() -> None:
    """stdin: a line of JSON with who and how many; then "come" and "go", until it ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    order = json.loads(sys.stdin.readline())
    addresses = [(host, port) for host, port in order["addresses"]]
    everyone = list(callers(addresses, order["count"], order["secret"].encode()))
    crowd = Crowd(everyone, order["calls_per_s"])
    print("ready", flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    here, came_s = False, 0.0
    while True:
        with suppress(BlockingIOError):
            word = os.read(sys.stdin.fileno(), 100)
            if not word:
                return
            here = word.strip().endswith(b"come")
            came_s, crowd.calls = time.monotonic(), -order["count"]  # they come all at once
            if not here:
                crowd.leave()
        if here:
            crowd.call_again(time.monotonic() - came_s)
            crowd.listen()
            crowd.drip()
        else:
            time.sleep(TURN_S)


if __name__ == "__main__":
    main()
