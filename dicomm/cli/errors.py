"""Bad input ends a command with one sentence and exit code 2."""

from __future__ import annotations

from contextlib import AbstractContextManager

from dicomm import Error
from hyperhetero import cli


class InputError(Error):
    """What the command was given cannot be used; the message is one sentence."""


def one_sentence() -> AbstractContextManager[None]:
    """Turns an error about the input into its sentence on standard error."""
    return cli.one_sentence(lambda: (Error, OSError))
