"""Which checkpoint a command goes on from."""

from __future__ import annotations

from pathlib import Path

from heteropp.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    find,
    newest_whole,
    steps,
    verify,
)
from heteropp.cli.errors import InputError
from heteropp.files import FileError


def checkpoint_to_resume(folder: Path, step: int | None, whole: bool) -> Checkpoint:
    """The checkpoint of a step, or the newest; `whole`: only if every file is as it was written.

    Raises InputError, which also names the last checkpoint that is whole.
    """
    try:
        found = find(folder, step)
        if found is not None:
            if whole:
                verify(found)
            return found
    except (FileError, CheckpointError) as error:
        damaged = steps(folder)[-1][0] if step is None else step
        earlier = newest_whole(folder, damaged)
        way_out = "no earlier checkpoint is whole"
        if earlier is not None:
            way_out = f"--resume-from {earlier.manifest.step} goes on from the last whole one"
        raise InputError(f"{error}; {way_out}") from None
    of = "" if step is None else f" of step {step}"
    raise InputError(f"{folder} holds no checkpoint{of} to resume from")
