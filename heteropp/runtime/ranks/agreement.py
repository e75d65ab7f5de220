"""What all nodes of a job must have alike is compared before the first step.

Each node reads its own files and has its own packages; where they differ, training would diverge or
hang in a way that names nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from pydantic import TypeAdapter

from heteropp.description.files import FileError, read_bytes
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.process_groups.control import Control
from heteropp.runtime.training_run import TrainingRun
from heteropp.state.hugging_face.weights import CONFIG

CLOCKS_S = 60.0  # by which the clocks of two nodes may differ, the waiting for the store included

Terms = dict[str, str]  # what has to be alike, and what a node has of it


def own_version() -> Terms:
    try:
        return {"hyperhetero": version("hyperhetero")}
    except PackageNotFoundError:  # it is on PYTHONPATH
        return {"hyperhetero": "not installed"}


def own_torch() -> Terms:
    """Returns its version without what a vendor's build adds to it."""
    return {"torch": version("torch").partition("+")[0]}


def own_terms(run: TrainingRun) -> Terms:
    """Returns what this node has: short values as they are, others by a hash. Raises FileError."""
    hyperparameters = TypeAdapter(Hyperparameters).dump_python(run.hyperparameters, mode="json")
    plans = TypeAdapter(list[Plan]).dump_json(list(run.by_length or (run.plan,)))
    values = {
        "--steps": run.steps,
        "--seed": run.seed,
        "--checkpoint-every": run.checkpoint_every,
        "--validate-every": run.validate_every,
        "--resume": run.resume,
        "--attention-within": run.attention_within,
        "--documents": run.documents,
        "--validation": sorted(run.validation),
        **hyperparameters,
    }
    settings = {name.replace("_", " "): json.dumps(value) for name, value in values.items()}
    cluster = _hash(read_bytes(run.cluster)) if run.cluster else "none"
    begins_from = None if run.resume else run.weights  # a resumed run reads no weights
    weights = _hash(read_bytes(begins_from / CONFIG)) if begins_from else "none"
    files = {"plan": _hash(plans), "cluster": cluster, "--from": weights}
    return {**own_version(), **files, **settings}


def _hash(content: bytes) -> str:
    return f"with hash {hashlib.sha256(content).hexdigest()[:12]}"


def unlike_terms(names: Sequence[str], terms: Sequence[Terms]) -> str | None:
    """Returns a sentence about the first that has something else than the first of all has."""
    for name, own in zip(names, terms, strict=True):
        found = [
            f"{term} {own.get(term)}, and {names[0]} {value}"
            for term, value in terms[0].items()
            if own.get(term) != value
        ]
        if found:
            return f"{name} has {'; '.join(found)}; expected the same on all nodes"
    return None


def unlike_clocks(names: Sequence[str], times_s: Sequence[float]) -> str | None:
    """Returns a sentence about the clock that is farthest from the first, if it is far from it."""
    off_s = [time_s - times_s[0] for time_s in times_s]
    worst = max(range(len(off_s)), key=lambda each: abs(off_s[each]))
    if abs(off_s[worst]) < CLOCKS_S:
        return None
    theirs, first = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(times_s[each])) for each in (worst, 0)
    )
    return (
        f"the clock of {names[worst]} says {theirs} UTC, and that of {names[0]} {first} UTC; "
        f"expected less than {CLOCKS_S:g} s between any two"
    )


def warn_of_unlike_torch(names: Sequence[str], torches: Sequence[Terms]) -> None:
    """Tells of it, and no more: vendors support unlike versions of torch."""
    if unlike := unlike_terms(names, torches):
        print(f"warning: {unlike} for equal results", file=sys.stderr, flush=True)


def check_agreement(run: TrainingRun, control: Control, name: Callable[[int], str]) -> None:
    """Raises FileError where nodes with launchers of their own have something unlike.

    name: of a rank, with its machine; rank 0 asks for all, as it is the one that compares.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return

    def unlike(texts: Sequence[str]) -> str:
        names = [name(rank) for rank in range(control.world_size)]
        terms, torches = zip(*map(json.loads, texts), strict=True)
        if found := unlike_terms(names, terms):
            return found
        warn_of_unlike_torch(names, torches)
        return ""

    def off(texts: Sequence[str]) -> str:
        names = [name(rank) for rank in range(control.world_size)]
        return unlike_clocks(names, [float(text) for text in texts]) or ""

    control.publish("terms", json.dumps([own_terms(run), own_torch()]))
    if found := control.answered("terms", unlike):
        raise FileError(found)
    # All ranks are here now, so that they look at their clocks at once.
    control.publish("clock", repr(time.time()))
    if found := control.answered("clock", off):
        raise FileError(found)
