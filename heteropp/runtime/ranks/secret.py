"""The secret that a job's processes share, by which dicomm knows its callers.

It never passes through the job's store, which whoever reaches its port can read.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dicomm.secret import FILE_VARIABLE, VARIABLE, SecretError, given_secret, read_secret
from heteropp.description.files import FileError, make_folder

FILE = ".secret"  # in the run's folder, with mode 600
WRITTEN_S = 10.0  # for another process to have written it
POLL_S = 0.05


def draw_secret() -> None:
    """Draws a secret for all that this process starts, unless one is given. Raises FileError."""
    os.environ[VARIABLE] = _given() or secrets.token_hex(32)


def share_secret(folder: Path) -> None:
    """Takes the secret that is given, else that of a folder which all of the job's nodes reach.

    Whoever comes first draws it. Raises FileError.
    """
    os.environ[VARIABLE] = _given() or _secret_of(folder)


def forget_secret(folder: Path) -> None:
    """Removes what was drawn, when the job has come to its end."""
    (folder / FILE).unlink(missing_ok=True)


def unlike_secrets(names: Sequence[str], are_own: Sequence[bool]) -> str | None:
    """Returns a sentence about the first whose secret is another one; None: all share one.

    are_own: whose secret is that of this process.
    """
    for name, is_own in zip(names, are_own, strict=True):
        if is_own != are_own[0]:
            return (
                f"{name} has another secret than {names[0]}; expected one for all nodes: in "
                f"{VARIABLE}, in the file that {FILE_VARIABLE} names, or in {FILE} of an --output "
                "that all of them reach"
            )
    return None


def _given() -> str:
    try:
        return given_secret()
    except SecretError as error:
        raise FileError(str(error)) from None


def _secret_of(folder: Path) -> str:
    make_folder(folder)
    path = folder / FILE
    try:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
    except OSError as error:
        raise FileError(f"the job's secret {path} cannot be written: {error.strerror}") from None
    deadline_s = time.monotonic() + WRITTEN_S
    while True:
        try:
            return read_secret(path)
        except SecretError as error:
            if time.monotonic() > deadline_s:  # or else whoever made it may be about to write it
                raise FileError(f"{error}; {FILE_VARIABLE} may name another") from None
        time.sleep(POLL_S)
