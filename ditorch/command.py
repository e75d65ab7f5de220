"""Whether `python -m ditorch` is what imports ditorch; nothing here needs the C++ part."""

from __future__ import annotations

import sys
import types
from typing import NoReturn


def is_the_command() -> bool:
    """Only true while the package is imported, not later."""
    if sys.argv[:1] != ["-m"]:  # Python's own mark while it imports a package to run it
        return False
    return sys.orig_argv[-len(sys.argv)] in ("ditorch", "-mditorch")


def refuse(reason: str) -> NoReturn:
    """Ends the import: an ImportError for programs, a sentence and exit code 2 for the command."""
    if not is_the_command():
        raise ImportError(reason) from None
    print(f"ditorch: {reason}", file=sys.stderr)
    sys.exit(2)


def say_plainly(error: ImportError) -> None:
    """Lets a program that does not catch this error end with its sentence, not with a traceback.

    What is wrong is said there in full, and lies outside the program.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, trace: types.TracebackType | None
    ) -> None:
        if value is error:
            print(f"{kind.__name__}: {value}", file=sys.stderr)
        else:
            before(kind, value, trace)

    sys.excepthook = hook
