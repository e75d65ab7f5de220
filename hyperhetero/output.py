"""Where results go: a file is written whole or not at all; one process at a time has a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = ".lock"  # of a folder
READER_S = 30.0  # for somebody to read the pipe that is written to


class LockError(ValueError):
    """Another process has it, or it cannot be locked; the message is one sentence."""


# --- files --------------------------------------------------------------------------------------


def write_file(path: Path, content: bytes) -> None:
    """Writes all of `content`, or leaves the file as it was; its folder must be there.

    A symbolic link stays one: the file that it names is written. A device, a pipe, and standard
    output or error under any name are written to. A file that is there keeps its permissions.
    Raises OSError.
    """
    status = _status(path)
    if status and (standard := _standard_stream(status)) is not None:
        _write_to(standard, content)
    elif status and not stat.S_ISREG(status.st_mode):
        _write_to_special(path, content)
    else:
        _replace(target_of(path), content, status)


def target_of(path: Path) -> Path:
    """The regular file that `path` names, or the one that writing would make there.

    To be replaced by renaming over it; a temporary file has to lie beside it. Raises OSError for
    what cannot be replaced: a folder, a device, a pipe, a file that is not to be written.
    """
    status = _status(path)
    if status and not stat.S_ISREG(status.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        what = None if stat.S_ISDIR(status.st_mode) else "It is a device or a pipe, no file"
        raise OSError(number, what or os.strerror(number), str(path))
    if status and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return Path(os.path.realpath(path))


def why_no_file(path: Path) -> str | None:
    """Says why no file can be written there, before the work for it begins; None if one can."""
    try:
        status = _status(path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    if status is None:
        return _why_nothing_under(path.absolute().parent, path)
    if stat.S_ISDIR(status.st_mode):
        return f"{path} is a folder; expected the name of a file to write"
    return None if os.access(path, os.W_OK) else f"{path} cannot be written: no permission"


def why_no_folder(path: Path) -> str | None:
    """Says why there can be no folder to write to under that name; None if there can."""
    return _why_nothing_under(path.absolute(), path)


def _why_nothing_under(folder: Path, path: Path) -> str | None:
    """folder: where files are to be made; those above it that are missing will be."""
    try:
        while (status := _status(folder)) is None:
            if folder.is_symlink():
                return f"{path} cannot be written: {folder} is a link to what is not there"
            folder = folder.parent
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} cannot be written: {folder} is a file, not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{path} cannot be written: no permission in folder {folder}"
    return None


def keep_permissions(temporary: Path, target: Path) -> None:
    """Gives a file that is about to replace `target` the owner and permissions of that one."""
    with suppress(FileNotFoundError):
        status = target.stat()
        with suppress(PermissionError):
            os.chown(temporary, status.st_uid, status.st_gid)
        os.chmod(temporary, stat.S_IMODE(status.st_mode))


def _status(path: Path) -> os.stat_result | None:
    """Follows links to what the name leads to; gives None where nothing is there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _standard_stream(status: os.stat_result) -> int | None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it has no number
            if os.path.samestat(os.fstat(stream.fileno()), status):
                stream.flush()  # what was said before comes before
                return stream.fileno()
    return None


def _write_to_special(path: Path, content: bytes) -> None:
    handle = _open_special(path)
    try:
        os.set_blocking(handle, True)
        _write_to(handle, content)
    finally:
        os.close(handle)


def _open_special(path: Path) -> int:
    """Waits for the reader of a pipe, who may come a little later."""
    deadline_s = time.monotonic() + READER_S
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO or not path.is_fifo():
                raise
            if time.monotonic() > deadline_s:
                raise OSError(errno.ENXIO, "Nobody reads this pipe", str(path)) from None
        time.sleep(0.05)


def _write_to(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _replace(target: Path, content: bytes, status: os.stat_result | None) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if status:
            keep_permissions(temporary, target)
        else:
            temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --- one at a time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """Who has it, as its lock file says."""

    host: str
    pid: int
    since: str  # time of day

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} since {self.since}"


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def held(
    lock: Path, what: str, *, own: bool = False, say: Callable[[str], None] = _warn
) -> Iterator[None]:
    """Only one process has `lock` at a time; the file says which, and is gone afterwards.

    The kernel's lock on the file decides, and ends with its process. What a process left that died
    is taken over, with a line to `say`, unless it is of the same job (`own`), which begins anew.
    Some shared file systems lock on each host by itself: what another host left is respected.

    what: the folder or file that is locked, for the sentences. Raises LockError.
    """
    file = _take(lock, what)
    try:
        before = _holder(file)
        me = Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %Z"))
        if before and not own:
            if before.host != me.host:
                raise LockError(
                    f"{what} is used by {before}, which cannot be asked from here; wait for it, or "
                    f"remove {lock} if it is gone"
                )
            say(f"{what} was used by {before}, which is gone; this run takes it over")
        _write_holder(file, me)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(file)


def _take(lock: Path, what: str) -> int:
    while True:
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LockError(f"{lock} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), lock.stat()):
                return file
        except BlockingIOError:
            holder = _holder(file) or "another process"
            os.close(file)
            raise LockError(f"{what} is used by {holder}; wait for it, or take another") from None
        except FileNotFoundError:
            pass  # its holder has just ended, and removed it
        except OSError as error:
            os.close(file)
            raise LockError(f"{lock} cannot be locked: {error.strerror}") from None
        os.close(file)


def _holder(file: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):  # nobody's, or torn
        return None


def _write_holder(file: int, holder: Holder) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)
