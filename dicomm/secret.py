"""The job's secret, as its processes are given it: by a variable, or in a file that one names."""

import os
import stat
from pathlib import Path

VARIABLE = "DICOMM_SECRET"
FILE_VARIABLE = "DICOMM_SECRET_FILE"


class SecretError(ValueError):
    """A file that holds no secret; the message is one sentence."""


def given_secret() -> str:
    """Returns DICOMM_SECRET, else what is in the file of DICOMM_SECRET_FILE, else nothing.

    Raises SecretError.
    """
    if secret := os.environ.get(VARIABLE):
        return secret
    path = os.environ.get(FILE_VARIABLE)
    return read_secret(Path(path), f" ({FILE_VARIABLE})") if path else ""


def read_secret(path: Path, where: str = "") -> str:
    """Reads a file that only its owner may read; `where`: what named it. Raises SecretError."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise SecretError(f"the job's secret {path}{where} cannot be read: {why}") from None
    if mode & 0o077:
        raise SecretError(
            f"the job's secret {path}{where} has mode {mode:o}, expected 600: others must not "
            "read or change it"
        )
    if not secret:
        raise SecretError(f"the job's secret {path}{where} is empty, expected a line of text")
    return secret
