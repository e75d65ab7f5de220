"""Traced stages on disk: one JSON file a model, in the user's cache folder.

A file's name holds a digest of all that its traces depend on: the model's sizes, torch, and the
sources of what was traced. A file that is broken, or not what it says, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from heteropp.description.files import FileError, cache_folder, write_text
from heteropp.models.spec import ModelSpec

T = TypeVar("T")
FORMAT = 1
SOURCES = (  # of heteropp, beside those of the model's family
    *("layout/boxes", "layout/flat_buffer", "layout/hspmd/annotation", "layout/parameter"),
    *("optimizer/adamw", "optimizer/flat", "optimizer/shard_optimizer", "optimizer/runs"),
    "optimizer/muon",
    *("optimizer/zero", "description/hyperparameters", "description/parameter_groups"),
    *("models/stage_module", "models/parallel/backward", "models/parallel/tensor_parallel"),
    *("models/attention",),
    *("cost/tracing/cache", "cost/tracing/kind", "cost/tracing/liveness"),
    *("cost/tracing/operators", "cost/tracing/stage", "cost/tracing/traces"),
)

_read: dict[Path, dict[str, Any]] = {}  # what this process knows of each file


def get(model: ModelSpec, key: str, make: Callable[[], Any], use: Callable[[Any], T]) -> T:
    """Returns what `use` makes of a model's entry; makes and keeps the entry if there is none."""
    path = _path(model)
    if path not in _read:
        _read[path] = _load(path)
    if key in _read[path]:
        try:
            return use(_read[path][key])
        except (ArithmeticError, LookupError, TypeError, ValueError):
            pass  # not an entry
    # as it will be read; what others wrote in the meantime stays
    entry = json.loads(json.dumps(make()))
    _read[path] = {**_load(path), key: entry}
    _store(path, _read[path])
    return use(entry)


@lru_cache(maxsize=64)
def _path(model: ModelSpec) -> Path:
    digest = hashlib.sha256(_code(model.family))
    digest.update(json.dumps(model.cost_key()).encode())
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", model.name)[:40]
    return cache_folder() / "traces" / f"{name}-{digest.hexdigest()[:24]}.json"


@cache
def _code(family: str) -> bytes:
    """Returns a digest of torch's version and of our sources that a trace depends on."""
    torch = find_spec("torch")  # which does not import it
    assert torch is not None and torch.origin is not None
    files = [Path(torch.origin).parent / "version.py"]
    root = Path(__file__).parents[2]
    files += [root / f"{source}.py" for source in SOURCES]
    files += sorted((root / "models" / family).glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.digest()


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        head, body = text.split("\n", 1)
        if head != _head(body):
            return {}
        stages = json.loads(text)["stages"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    return stages if isinstance(stages, dict) else {}


def _store(path: Path, entries: dict[str, Any]) -> None:
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(entries[key], separators=(',', ':'))}"
        for key in sorted(entries)
    )
    body = f'"stages": {{\n{lines}\n}}}}\n'
    with contextlib.suppress(FileError):  # the next process traces again
        write_text(path, f"{_head(body)}\n{body}")


def _head(body: str) -> str:
    """Returns the first line of a file, whose digest tells whether the other lines are whole."""
    return f'{{"format": {FORMAT}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}",'
