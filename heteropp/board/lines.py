"""Reads a file of JSON lines as it grows: only what is new, and only lines that are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from heteropp.description.files import FileError

CHUNK_BYTES = 4 << 20


class LineTail:
    """The lines of a file that were added since they were last asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times_replaced = 0  # a resumed run writes its file anew
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset, self._line = 0, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the objects of whole lines that are new; a half-written last one comes later.

        After `times_replaced` has grown they are those of the whole file. Whoever stops midway gets
        the rest next time. Raises FileError for a whole line that is no JSON object.
        """
        try:
            with self.path.open("rb") as file:
                self._notice_replacement(file.fileno())
                file.seek(self._offset)
                rest = b""
                while chunk := file.read(CHUNK_BYTES):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        found = self._parsed(line)
                        self._offset, self._line = self._offset + len(line) + 1, self._line + 1
                        yield found
        except FileNotFoundError:
            return
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror}") from None

    def _notice_replacement(self, file: int) -> None:
        status = os.fstat(file)
        if self._inode and (status.st_ino != self._inode or status.st_size < self._offset):
            self._forget()
            self.times_replaced += 1
        self._inode = status.st_ino

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            found = from_json(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise FileError(f"{self.path}:{self._line + 1} is not a JSON object")
        return found
