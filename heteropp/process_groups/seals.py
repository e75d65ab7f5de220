"""What a job's processes write to its store, with a seal that only they can make.

Whoever reaches the store's port can write to it. A value without a true seal, or with the seal of
another key or of another start of the job, is told once and never believed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch.distributed as dist

from dicomm.secret import VARIABLE

NOTHING = secrets.token_hex(16)  # what nobody writes, as nobody else knows it
TRUE_S = 10.0  # for a process of the job to overwrite what somebody else wrote
POLL_S = 0.02


class StorePart(dist.PrefixStore):
    """A part of a store that knows its own name, to which the seals of its values are bound."""

    def __init__(self, name: str, whole: dist.Store) -> None:
        super().__init__(name, whole)
        self.name, self.whole = name, whole

    def clone(self) -> StorePart:
        """Returns the same part over a connection of its own."""
        return StorePart(self.name, self.whole.clone())  # type: ignore[attr-defined]


class Found(NamedTuple):
    """A value of the store."""

    text: str  # whoever wrote it
    is_true: bool  # whether a process of this job wrote it, under this key


class UntrueError(dist.DistStoreError):
    """What a process waited for was written by nobody who knows the job's secret."""

    def __init__(self, keys: Sequence[str], found: Sequence[Found]) -> None:
        untrue = [key for key, one in zip(keys, found, strict=True) if not one.is_true]
        super().__init__(
            f"nobody with this job's secret wrote '{untrue[0]}' to the job's store; expected one "
            "secret for all of its processes"
        )
        self.found = found


class Seals:
    told: ClassVar[set[str]] = set()  # keys that somebody without the secret wrote

    def __init__(self, store: dist.Store) -> None:
        self.store, self.path = store, _path(store)

    def set(self, key: str, text: str) -> None:
        """Writes a text. Raises RuntimeError (the store's), as all of these do."""
        self.store.set(key, self._sealed(key, text))

    def set_all(self, texts: Mapping[str, str]) -> None:
        """Writes a text under each key, in one request."""
        sealed = [self._sealed(key, text) for key, text in texts.items()]
        self.store.multi_set(list(texts), sealed)  # type: ignore[attr-defined]

    def set_first(self, key: str, text: str) -> str:
        """Writes a text unless one is there; returns the one that is."""
        found = self.open(key, self.store.compare_set(key, "", self._sealed(key, text)))
        if found.is_true:
            return found.text
        self.set(key, text)  # in place of what no process of the job has written
        return text

    def get(self, key: str) -> str | None:
        """Returns what the job has written by now, if anything; it does not wait."""
        found = self.find(key)
        return found.text if found and found.is_true else None

    def wait(self, keys: Sequence[str]) -> list[str]:
        """Returns the texts of several keys; waits until the job has written all of them.

        Raises DistStoreError where that takes longer than the store waits, and UntrueError.
        """
        until_s = None
        while True:
            found = self.read(keys)
            if all(one.is_true for one in found):
                return [one.text for one in found]
            until_s = until_s or time.monotonic() + TRUE_S
            if time.monotonic() > until_s:
                raise UntrueError(keys, found)
            time.sleep(POLL_S)

    def read(self, keys: Sequence[str]) -> list[Found]:
        """Returns what anybody has written under several keys; waits until all are there."""
        values = self.store.multi_get(list(keys))
        return [self.open(*each) for each in zip(keys, values, strict=True)]

    def find(self, key: str) -> Found | None:
        """Returns what anybody has written by now, if anything; it does not wait."""
        # one request, which waits for nobody, also where a key goes away meanwhile
        value = self.store.compare_set(key, NOTHING, NOTHING)
        return None if value == NOTHING.encode() else self.open(key, value)

    def open(self, key: str, value: bytes) -> Found:
        """Takes a value as the store has it, and tells of an untrue one."""
        text = ""
        # of what no process can have written
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            match json.loads(value):
                case [str(text), str(seal)] if hmac.compare_digest(self._seal(key, text), seal):
                    return Found(text, True)
        name = self.path + key
        if name not in self.told:
            self.told.add(name)
            print(
                f"somebody without the job's secret wrote '{name}' to the job's store, which is "
                "not believed",
                file=sys.stderr,
                flush=True,
            )
        return Found(text, False)

    def _sealed(self, key: str, text: str) -> str:
        return json.dumps([text, self._seal(key, text)])

    def _seal(self, key: str, text: str) -> str:
        secret = os.environ.get(VARIABLE, "")
        words = json.dumps([self.path + key, text])
        return hmac.digest(secret.encode(), words.encode(), "sha256").hex()


def _path(store: dist.Store) -> str:
    """Returns the names of the parts that a store is a part of, from the whole on."""
    if isinstance(store, StorePart):
        return f"{_path(store.whole)}{store.name}/"
    return ""
