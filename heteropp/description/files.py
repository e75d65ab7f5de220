"""Typed files: TOML or JSON to frozen dataclasses, with one sentence for what is wrong."""

from __future__ import annotations

import errno
import json
import os
import select
import tomllib
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hyperhetero.input import decoded, problems
from hyperhetero.output import target_of, write_file

LARGEST_BYTES = 256 << 20  # of a file that is read whole: a device such as /dev/zero has no end

WRITER_S = 30.0  # for somebody to write to the pipe that is read

T = TypeVar("T")


class FileError(ValueError):
    """A file that cannot be used; the message is one sentence naming the file and the place."""


def read_toml(path: Path, type_: type[T]) -> T:
    """Reads a TOML file as `type_`. Raises FileError."""
    text = read_text(path)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of numbers too long to read, and of depth
        raise FileError(f"{path} is not TOML: {error}") from None
    return _validated(path, data, type_)


def read_json(path: Path, type_: type[T]) -> T:
    """Reads a JSON file as `type_`. Raises FileError."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}") from None
    return _validated(path, data, type_)


def read_text(path: Path) -> str:
    """Reads a whole text file. Raises FileError."""
    try:
        return decoded(read_bytes(path))
    except UnicodeDecodeError:
        raise FileError(f"{path} is not UTF-8 text") from None


def read_bytes(path: Path) -> bytes:
    """Reads a whole file of at most LARGEST_BYTES. Raises FileError."""
    try:
        with _opened(path) as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of a name with a zero byte
        raise FileError(f"{str(path)!r} cannot be read: {error}") from None
    if len(content) > LARGEST_BYTES:
        raise FileError(f"{path} has more than {LARGEST_BYTES >> 20} MiB, which no such file needs")
    return content


def _opened(path: Path) -> IO[bytes]:
    """Opens a file to read; of a pipe, it waits WRITER_S for somebody to write. Raises OSError."""
    if not path.is_fifo():
        return path.open("rb")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ready, _, _ = select.select([handle], [], [], WRITER_S)
    if not ready:
        os.close(handle)
        raise OSError(errno.EPIPE, "Nobody writes to this pipe")
    os.set_blocking(handle, True)
    return os.fdopen(handle, "rb")


def cache_folder() -> Path:
    """Where what can be made again is kept: the platform's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyperhetero"


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, unless it is there. Raises FileError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"folder {path} cannot be made: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Writes a dataclass as JSON, atomically: readers see the old file or the whole new one.

    Raises FileError.
    """
    text = TypeAdapter(type(value)).dump_json(value, indent=2).decode() + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically. Raises FileError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically, and its folder where that is missing. Raises FileError."""
    make_folder(path.parent)
    try:
        write_file(path, content)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None


def check_file(path: Path) -> None:
    """Raises FileError where a file that is read and written again cannot be."""
    try:
        target_of(path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None


def flush(path: Path) -> None:
    """Puts a file, or a folder's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _validated(path: Path, data: Any, type_: type[T]) -> T:
    try:
        # JSON mode, so that lists are accepted where the dataclass has tuples
        text = json.dumps(data, default=str)
    except ValueError:
        raise FileError(f"{path} has a number that is too long to read") from None
    except RecursionError:
        raise FileError(f"{path} is nested too deeply to read") from None
    try:
        return TypeAdapter(type_).validate_json(text)
    except ValidationError as error:
        raise FileError(f"{path}: {problems(error, data)}") from None
