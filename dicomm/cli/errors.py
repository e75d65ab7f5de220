"""Bad input ends a command with one sentence and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dicomm import Error

BAD_INPUT = 2


class InputError(Error):
    """What the command was given cannot be used; the message is one sentence."""


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns an error about the input into its sentence on standard error."""
    try:
        yield
    except (Error, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
