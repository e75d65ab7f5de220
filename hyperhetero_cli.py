"""The command line that all commands share: whatever is wrong with it is one sentence.

It stands outside the three packages, each of which has commands.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from hyperhetero_input import in_our_words

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
            ended = super().__call__(*arguments, standalone_mode=False, **options)
        except typer.Abort:
            print("aborted", file=sys.stderr)
            sys.exit(1)
        except Exception as error:
            if not _is_about_the_command_line(error):
                raise
            print(_sentence(error), file=sys.stderr)
            sys.exit(BAD_INPUT)
        sys.exit(ended if isinstance(ended, int) else 0)


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
