"""Which run a command goes on with, and from which checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heteropp.api.errors import InputError
from heteropp.api.training.place import launched
from heteropp.api.training.starts import newest_options
from heteropp.description.files import FileError
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    find,
    newest_whole,
    steps,
    verify,
)


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


def run_to_resume(said: Mapping[str, Any], default: Path) -> dict[str, Any]:
    """What the command line need not say of a run that goes on, by parameter.

    said: what it says, as texts; default: the output of one that names none. Raises InputError or
    FileError.
    """
    folder, output = said.get("folder"), said.get("output")
    if not (said.get("resume") or said.get("resume_from")):
        if isinstance(folder, str):
            raise InputError(f"{folder} is no option; a run's folder is given to --resume")
        return {}
    if isinstance(folder, str) and output and Path(folder) != Path(output):
        raise InputError(
            f"--resume {folder} goes on in its own folder; leave out --output {output}"
        )
    run = Path(folder if isinstance(folder, str) else output or default)
    options = newest_options(run)
    if not options and not (said.get("plan") or said.get("bucket")):
        raise InputError(
            f"{run} does not say what it was started with; give its --plan and --cluster, too"
        )
    if said.get("plan") or said.get("bucket"):  # instead of the other one
        of_plan, of_buckets = ("plan", "attention_within"), ("bucket", "documents")
        for name in ("plan", *of_buckets) if said.get("plan") else of_plan:
            options.pop(name, None)
    if launched():  # torchrun has its own, and others have none
        options.pop("restarts", None)
    return {**options, "output": str(run)}
