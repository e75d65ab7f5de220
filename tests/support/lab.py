"""The machines of tools/machines, for tests; where none can be made, a test is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import machines
from installed import lack
from machines import Machine, MachinesError


@contextmanager
def lab(count: int, folder: Path) -> Iterator[list[Machine]]:
    """folder: what all of them have in common besides the working directory."""
    with ExitStack() as stack:
        try:
            there = stack.enter_context(machines.machines(count, folder))
        except MachinesError as error:
            lack(error.what, error.remedy)
        yield there
