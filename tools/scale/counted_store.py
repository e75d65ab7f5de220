"""A real store of torch's behind a relay that notes what its clients ask."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

LOOPBACK = "127.0.0.1"

# torch's QueryType, in its order, and what follows each: k(ey), v(alue), n(umber), w(ord of 4
# bytes), K(eys) or P(airs of key and value), with their count before them
QUERIES = {
    0: ("validate", "w"),
    1: ("set", "kv"),
    2: ("compare_set", "kvv"),
    3: ("get", "k"),
    4: ("add", "kn"),
    5: ("check", "K"),
    6: ("wait", "K"),
    7: ("num_keys", ""),
    8: ("delete_key", "k"),
    9: ("append", "kv"),
    10: ("multi_get", "K"),
    11: ("multi_set", "P"),
    12: ("cancel_wait", ""),
    13: ("ping", "w"),
}


class Request(NamedTuple):
    client: int  # number of its connection
    door: int  # number of the port that it called
    query: str
    keys: tuple[str, ...]

    def is_about(self, prefix: str) -> bool:
        return bool(self.keys) and self.keys[0].startswith(prefix)


def keep_counted_store(pipe: Connection) -> None:
    """Tells its ports, one, through the pipe; then, whenever asked, what was asked of it since."""
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    asyncio.run(_relay(1, lambda: store.port, pipe))


def count_for_store(doors: int, port_file: Path, pipe: Connection) -> None:
    """The same for a store that is elsewhere, with several ports.

    port_file: has the store's own port in it by the time that a client calls.
    """
    asyncio.run(_relay(doors, lambda: int(port_file.read_text()), pipe))


async def _relay(doors: int, store_port: Callable[[], int], pipe: Connection) -> None:
    requests: list[Request] = []
    clients = itertools.count()

    async def serve(door: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, queries = await asyncio.open_connection(LOOPBACK, store_port())
        client = next(clients)

        async def forward() -> None:
            with contextlib.suppress(OSError):
                while content := await answers.read(1 << 16):
                    writer.write(content)
            writer.close()

        answering = asyncio.create_task(forward())
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                content, query, keys = await _query(reader)
                requests.append(Request(client, door, query, keys))
                queries.write(content)
        queries.close()
        await answering

    servers = [
        await asyncio.start_server(partial(serve, door), LOOPBACK, 0) for door in range(doors)
    ]
    pipe.send([server.sockets[0].getsockname()[1] for server in servers])

    def report() -> None:
        pipe.recv()
        pipe.send(requests.copy())
        requests.clear()

    asyncio.get_running_loop().add_reader(pipe.fileno(), report)
    await asyncio.Event().wait()


async def _query(reader: asyncio.StreamReader) -> tuple[bytes, str, tuple[str, ...]]:
    content = bytearray()
    keys: list[str] = []

    async def take(size: int) -> bytes:
        part = await reader.readexactly(size)
        content.extend(part)
        return part

    async def number() -> int:
        return struct.unpack("q", await take(8))[0]

    async def value() -> bytes:
        return await take(await number())

    async def key() -> None:
        keys.append((await value()).decode())

    async def several(*parts: Callable[[], Awaitable[object]]) -> None:
        for _ in range(await number()):
            for part in parts:
                await part()

    query, form = QUERIES[(await take(1))[0]]
    for part in form:
        match part:
            case "k":
                await key()
            case "v":
                await value()
            case "n":
                await number()
            case "w":
                await take(4)
            case "K":
                await several(key)
            case "P":
                await several(key, value)
    return bytes(content), query, tuple(keys)
