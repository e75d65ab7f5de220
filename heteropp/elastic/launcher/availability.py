"""The file that says which chips there are: what a cloud or a cluster's scheduler tells a job.

    {"a-0": 2, "b-0": 1}

as JSON or TOML: chips by node; a node that is not named has none. A chip that goes from it is
noticed, one that comes may be used. It is read every few seconds, from any fsspec URL.
"""

from __future__ import annotations

import json
import threading
import tomllib
from typing import Any

import fsspec

from heteropp.description.cluster import Cluster
from heteropp.description.files import FileError

POLL_S = 2.0


class Availability:
    """Reads the file in a thread, as a remote one may take its time."""

    def __init__(self, url: str, cluster: Cluster) -> None:
        """Reads it once. Raises FileError."""
        self.url, self.cluster = url, cluster
        self.chips = self._read()
        self.warning: str | None = None  # what is wrong with the file by now
        self.warned: str | None = None
        self.finished = threading.Event()
        threading.Thread(target=self._watch, name="availability", daemon=True).start()

    def close(self) -> None:
        self.finished.set()

    def take_warning(self) -> str | None:
        """What is wrong with the file, once."""
        if (warning := self.warning) == self.warned:
            return None
        self.warned = warning
        return warning

    def _watch(self) -> None:
        while not self.finished.wait(POLL_S):
            try:
                self.chips = self._read()
                self.warning = None
            except FileError as error:
                self.warning = str(error)

    def _read(self) -> dict[str, int]:
        try:
            with fsspec.open(self.url, "rb") as file:
                text = file.read().decode()
        except Exception as error:  # whatever the store's client raises
            what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise FileError(f"{self.url} cannot be read: {what}") from None
        chips = self._parsed(text)
        size = {
            name: len(node.ranks)
            for name, node in zip(self.cluster.node_names, self.cluster.nodes, strict=True)
        }
        for node, count in chips.items():
            if node not in size:
                raise FileError(
                    f"{self.url}: {node} is no node of cluster {self.cluster.name}; "
                    f"expected one of {', '.join(size)}"
                )
            if type(count) is not int or not 0 <= count <= size[node]:
                raise FileError(
                    f"{self.url}: {node} is {json.dumps(count, default=str)}; "
                    f"expected 0 to {size[node]} chips"
                )
        return chips

    def _parsed(self, text: str) -> dict[str, Any]:
        if not text.strip():  # also for a moment, while `echo ... >file` writes it; {} is no chip
            raise FileError(f"{self.url} is empty; expected chips by node, or {{}} for none")
        for read in (json.loads, tomllib.loads):
            try:
                found = read(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
        raise FileError(f"{self.url} is neither JSON nor TOML of chips by node")
