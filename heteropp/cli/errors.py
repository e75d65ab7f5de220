"""Bad input ends a command with one sentence and exit code 2."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hyperhetero import cli


def one_sentence() -> AbstractContextManager[None]:
    """Turns an error about the input into its sentence on standard error."""
    return cli.one_sentence(_input_errors)


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
