"""Where the ranks of a job find each other: any object with these two methods.

`set(key: str, value: bytes)`; `get(key: str, timeout_s: float) -> bytes`, which waits for the key
and raises TimeoutError.
"""

import os
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes: ...


class FileStore:
    """One file per key in a folder that every rank can reach; made if it is missing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(path)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / urllib.parse.quote(key, safe="")

    def set(self, key: str, value: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".new-", delete=False) as file:
            file.write(value)
        os.replace(file.name, self._file(key))  # a reader sees all of it or nothing

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._file(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"no key {key!r} in {self._folder} after {timeout_s:.3f} s"
                    ) from None
            time.sleep(0.002)


class TorchStore:
    """A torch.distributed store."""

    def __init__(self, store) -> None:  # torch.distributed.Store, but torch is not imported here
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        # Polls: a blocking wait would lock the connection that this process's threads share.
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no key {key!r} in the store after {timeout_s:.3f} s")
            time.sleep(0.002)
        return self._store.get(key)
