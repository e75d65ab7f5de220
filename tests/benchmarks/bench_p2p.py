"""Point-to-point messages between two processes, there and back."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

import dicomm
from dicomm.bench.ranks import memory

SIZES = {"8 B": 8, "1 KiB": 1 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
ROUNDS = 20
MOST_ITERATIONS = 1000  # of a round, which for long messages are fewer

pytestmark = pytest.mark.benchmark(group="point-to-point, there and back")


def join(rank: int, folder: str, secret: str, transport: str) -> dicomm.Communicator:
    store = dicomm.FileStore(folder)
    return dicomm.Communicator(
        rank, 2, store, secret=secret, transport=transport, listen_address="127.0.0.1"
    )


def echo(folder: str, secret: str, transport: str) -> None:
    """Sends back as many messages of a size as the other rank announces, until that is none."""
    peer = join(1, folder, secret, transport)
    announced = memoryview(bytearray(16)).cast("q")
    while True:
        peer.recv(announced, 0)
        size_bytes, count = announced
        if not count:
            return peer.close()
        data = memory(size_bytes)
        for _ in range(count):
            peer.recv(data, 0)
            peer.send(data, 0)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def to_echo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dicomm.Communicator]:
    folder, secret = str(tmp_path_factory.mktemp("store")), secrets.token_hex()
    arguments = folder, secret, request.param
    other = multiprocessing.get_context("spawn").Process(target=echo, args=arguments)
    other.start()
    here = join(0, *arguments)
    yield here
    here.send(memoryview(bytearray(16)), 1)
    other.join()
    here.close()
    assert other.exitcode == 0


@pytest.mark.parametrize("size", SIZES)
def test_there_and_back(to_echo: dicomm.Communicator, size: str, benchmark: Any) -> None:
    data = memory(SIZES[size])
    iterations = max(1, min(MOST_ITERATIONS, (64 << 20) // SIZES[size]))
    announced = memoryview(bytearray(16)).cast("q")
    announced[0], announced[1] = SIZES[size], (ROUNDS + 1) * iterations + 1

    def there_and_back() -> None:
        to_echo.send(data, 1)
        to_echo.recv(data, 1)

    to_echo.send(announced, 1)
    benchmark.pedantic(there_and_back, rounds=ROUNDS, iterations=iterations, warmup_rounds=1)
