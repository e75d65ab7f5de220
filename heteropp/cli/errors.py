"""Bad input ends a command with one sentence and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

BAD_INPUT = 2


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns an error about the input into its sentence on standard error."""
    try:
        yield
    except _input_errors() as error:
        print(error, file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


def _input_errors() -> tuple[type[Exception], ...]:
    from heteropp.api.errors import InputError
    from heteropp.description.files import FileError
    from heteropp.description.hyperparameters import HyperparameterError
    from heteropp.description.plan import PlanError
    from heteropp.description.profile import ProfileError
    from heteropp.models.spec import ModelError
    from hyperhetero.output import LockError

    return (
        FileError,
        HyperparameterError,
        InputError,
        LockError,
        ModelError,
        PlanError,
        ProfileError,
    )
