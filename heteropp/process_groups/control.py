"""The job's small talk: texts that ranks exchange through the c10d store, beside the training.

What all ranks have to agree on is `answered` by rank 0, which alone reads what every rank said: so
each of the others asks the store for one text, however many ranks there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from heteropp.process_groups.seals import Seals, StorePart


class Control:
    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout_s: float = 300
    ) -> None:
        self.store = StorePart("control", store)
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self.seals = Seals(self.store)
        self.rank, self.world_size = rank, world_size

    def publish(self, key: str, text: str) -> None:
        """Says something under a key that is new to this rank."""
        self.seals.set(f"{key}/{self.rank}", text)

    def collect(self, key: str) -> list[str]:
        """Returns what every rank published under a key, by rank; waits for all of them.

        For one rank alone. Raises UntrueError, with what is found of all ranks.
        """
        return self.seals.wait(self._keys(key))

    def answered(self, key: str, answer: Callable[[Sequence[str]], str]) -> str:
        """Returns what rank 0 makes of the texts of all ranks, by rank; each has published its own.

        Waits for all of them. The key must be new. Raises UntrueError.
        """
        if self.rank == 0:
            self.announce(f"{key}/answer", answer(self.collect(key)))
        return self.hear(f"{key}/answer")

    def forget(self, key: str) -> None:
        """Frees what was published; one rank calls it, once all that want it have it."""
        for name in self._keys(key):
            self.store.delete_key(name)

    def withdraw(self, key: str) -> None:
        """Frees what this rank published; all that want it have it."""
        self.store.delete_key(f"{key}/{self.rank}")

    def barrier(self, key: str) -> None:
        """Waits until every rank is here; the key must be new. Raises UntrueError."""
        self.publish(key, "")
        self.answered(key, lambda _: "")

    def leave(self) -> None:
        """Ends this rank's use of the store, which may be in the process of rank 0: that waits.

        It does so until all ranks have left, or for as long as the store waits, as one may have
        died.
        """
        with contextlib.suppress(dist.DistError):
            self.publish("left the store", "")
            if self.rank == 0:
                self.collect("left the store")

    def announce(self, key: str, text: str) -> None:
        """Says something once for all ranks."""
        self.seals.set(key, text)

    def announce_all(self, texts: Mapping[str, str]) -> None:
        """Says something under each of several keys, in one request."""
        self.seals.set_all(texts)

    def retract(self, key: str) -> None:
        """Frees what was announced, if anything was; called once all that want it have heard it."""
        self.store.delete_key(key)

    def hear(self, key: str) -> str:
        """Returns what is announced under a key; waits for it. Raises UntrueError."""
        return self.seals.wait([key])[0]

    def announced(self, key: str) -> str | None:
        """Returns what is announced under a key, or None if nothing is yet."""
        return self.seals.get(key)

    def _keys(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.world_size)]
