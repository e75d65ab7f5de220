"""The command line that all commands share: whatever is wrong with it is one sentence."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.main import get_command

from hyperhetero.input import in_our_words
from hyperhetero.output import why_no_file, why_no_folder

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT = 2


class CommandLine(typer.Typer):
    """A command, or several, whose errors are one sentence on standard error, not a frame."""

    def __init__(self, **options: Any) -> None:
        """Takes typer's options."""
        super().__init__(add_completion=False, pretty_exceptions_enable=False, **options)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Runs the command and exits with its code; arguments: those of the program if absent."""
        try:
            try:
                self._run(*arguments, **options)
            except SystemExit:
                if sys.stdout:
                    sys.stdout.flush()
                raise
        except OSError:
            if not (error := _output_error()):
                raise
            _discard_output()
            if error.errno != errno.EPIPE:  # whoever reads a pipe may stop when they like
                print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
            sys.exit(1)

    def _run(self, *arguments: Any, **options: Any) -> None:
        command = get_command(self)
        for parameter in _parameters(command):
            parameter.process_value = _checked(parameter, parameter.process_value)
        try:
            ended = command(*arguments, standalone_mode=False, **options)
        except typer.Abort:
            print("aborted", file=sys.stderr)
            sys.exit(1)
        except Exception as error:
            if not _is_about_the_command_line(error):
                raise
            print(_sentence(error), file=sys.stderr)
            sys.exit(BAD_INPUT)
        sys.exit(ended if isinstance(ended, int) else 0)


@contextmanager
def one_sentence(kinds: Callable[[], tuple[type[Exception], ...]]) -> Iterator[None]:
    """Ends the command with an error's sentence on standard error and exit code BAD_INPUT.

    kinds: returns the errors that are about the input; called only once there is an error.
    """
    try:
        yield
    except kinds() as error:
        print(error, file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


def _output_error() -> OSError | None:
    """Writes an empty line, and returns why that cannot be; None if it can."""
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None


def _discard_output() -> None:
    """Lets standard output go nowhere, so that Python says nothing of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def output_file(*names: str, help: str) -> Any:
    """Returns a typer option for a file to write, which is refused before the command begins."""
    return typer.Option(*names, help=help, callback=_refusing(why_no_file))


def output_folder(*names: str, help: str) -> Any:
    """Returns a typer option for a folder to write to, likewise."""
    return typer.Option(*names, help=help, callback=_refusing(why_no_folder))


def _refusing(why_not: Callable[[Path], str | None]) -> Callable[[Path | None], Path | None]:
    def check(path: Path | None) -> Path | None:
        if path is not None and (problem := why_not(path)):
            raise typer.BadParameter(problem)
        return path

    return check


def _parameters(command: Any) -> Iterator[Any]:
    """The options and arguments of a command and of those under it."""
    yield from command.params
    for beneath in getattr(command, "commands", {}).values():
        yield from _parameters(beneath)


def _checked(parameter: Any, process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps process_value to refuse infinities, NaN, integers over 64 bits and empty paths.

    Python takes an empty path for the current folder.
    """

    def read(context: Any, given: Any) -> Any:
        value = process(context, given)
        several = isinstance(value, list | tuple)
        texts = given if isinstance(given, list | tuple) else [given]
        for one, text in zip(value if several else [value], texts, strict=False):
            if isinstance(one, float) and not math.isfinite(one):
                _refuse(context, parameter, f"expected a finite number, got {text}")
            if isinstance(one, int) and abs(one) >= 1 << 63:
                _refuse(context, parameter, f"expected a number of at most 64 bits, got {text}")
            if isinstance(one, Path) and text == "":
                _refuse(context, parameter, "expected a path, got an empty text")
        return value

    return read


def _refuse(context: Any, parameter: Any, problem: str) -> None:
    raise typer.BadParameter(problem, ctx=context, param=parameter)


def wide_console() -> Console:
    """Returns a terminal's own width; wide enough for tables where the output goes to a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=130)


def _is_about_the_command_line(error: Exception) -> bool:
    """Looks at the name of the class, which stands in another module in every version of typer."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _sentence(error: Any) -> str:
    text = error.format_message().strip()
    if type(error).__name__ == "NoArgsIsHelpError":
        return text  # which is the help itself, or rich has just printed it
    path = error.ctx.command_path if getattr(error, "ctx", None) else ""
    text = in_our_words(text).rstrip(".")
    return f"{text}; see {path} --help" if path else text
