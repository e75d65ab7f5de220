"""Traced stages on disk: one JSON file a model, in the user's cache folder.

A file's name holds a digest of all that its traces depend on: the model's sizes, torch, and the
sources of what was traced.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from heteropp.description.files import cache_folder
from heteropp.description.kept import digest_of_code, read_entries, write_entries
from heteropp.models.spec import ModelSpec
from hyperhetero.garbage import collecting

T = TypeVar("T")
SOURCES = (  # of heteropp, beside those of the model's family
    *("layout/boxes", "layout/flat_buffer", "layout/hspmd/annotation", "layout/parameter"),
    *("optimizer/adamw", "optimizer/flat", "optimizer/shard_optimizer", "optimizer/runs"),
    "optimizer/muon",
    *("optimizer/zero", "description/hyperparameters", "description/parameter_groups"),
    *("models/stage_module", "models/parallel/backward", "models/parallel/tensor_parallel"),
    *("description/kept", "models/attention", "models/attention_work"),
    *("models/causal_attention", "models/documents", "models/fused_attention"),
    *("models/masked_flops", "cost/tracing/scores"),
    *("models/last_tokens", "models/parallel/context_parallel", "models/parallel/expert_parallel"),
    "models/auxiliary_loss",
    *("models/parallel/token_context", "models/parallel/token_slices"),
    *("models/parallel/context_attention", "models/parted", "cost/token_shares"),
    *("cost/tracing/cache", "cost/tracing/kind", "cost/tracing/liveness"),
    *("cost/tracing/operators", "cost/tracing/results", "cost/tracing/slices"),
    *("cost/tracing/stage", "cost/tracing/traces"),
)

UNWRITTEN = 1 / 8  # of a file's entries, at most, until flush() is called: each write is of all

# asked before each entry is made, which may take long: whether the work in this context is needed
wanted: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)

_making = RLock()  # what counts a stage's operators is the whole process's, not a thread's
_read: dict[Path, dict[str, Any]] = {}  # what this process knows of each file
_unwritten: dict[Path, dict[str, Any]] = {}  # and what it has not written of it


class NoLongerWantedError(Exception):
    """What an entry was to be made for is not needed any more."""


def get(model: ModelSpec, key: str, make: Callable[[], Any], use: Callable[[Any], T]) -> T:
    """Returns what `use` makes of a model's entry; makes and keeps the entry if there is none.

    Raises NoLongerWantedError where an entry would be made and `wanted` says that it is not.
    """
    path = _path(model)
    if path not in _read:
        _read[path] = read_entries(path)
    if key in _read[path]:
        try:
            return use(_read[path][key])
        except (ArithmeticError, LookupError, TypeError, ValueError):
            pass  # not an entry
    if not wanted.get()():
        raise NoLongerWantedError(f"{model.name}: {key}")
    with _making, collecting(True):  # of modules and graphs, which are full of cycles
        entry = json.loads(json.dumps(make()))  # as it will be read
    _read[path][key] = entry
    new = _unwritten.setdefault(path, {})
    new[key] = entry
    if len(new) > UNWRITTEN * len(_read[path]):
        _write(path)
    return use(entry)


def _write(path: Path) -> None:
    """Writes what is new to a file, in which stays what others wrote in the meantime."""
    new = _unwritten.pop(path, {})  # another thread may have written it meanwhile
    _read[path] = {**_known(path), **new}
    write_entries(path, _read[path])


@atexit.register
def flush() -> None:
    """Writes what this process alone knows: before it starts others that would trace it again."""
    for path in [*_unwritten]:
        _write(path)


def read_again(model: ModelSpec) -> None:
    """Reads what another process has written of a model."""
    path = _path(model)
    _read[path] = _known(path)


def _known(path: Path) -> dict[str, Any]:
    """Returns what a file has by now, and what this process knew of it."""
    return {**read_entries(path), **_read.get(path, {})}


@lru_cache(maxsize=64)
def _path(model: ModelSpec) -> Path:
    digest = hashlib.sha256(digest_of_code((*SOURCES, f"models/{model.family}")))
    digest.update(json.dumps(model.cost_key()).encode())
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", model.name)[:40]
    return cache_folder() / "traces" / f"{name}-{digest.hexdigest()[:24]}.json"
