"""The job's small talk: texts that ranks exchange through the c10d store, beside the training."""

from __future__ import annotations

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

        Raises UntrueError, with what is found of all ranks.
        """
        return self.seals.wait(self._keys(key))

    def forget(self, key: str) -> None:
        """Frees what was published; one rank calls it, once all that want it have it."""
        for name in self._keys(key):
            self.store.delete_key(name)

    def barrier(self, key: str) -> None:
        """Waits until every rank is here; the key must be new. Raises UntrueError."""
        self.publish(key, "")
        self.collect(key)

    def announce(self, key: str, text: str) -> None:
        """Says something once for all ranks."""
        self.seals.set(key, text)

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
