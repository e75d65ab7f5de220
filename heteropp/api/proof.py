"""Proof before trust: a family that transformers knows is held against it before it is trained.

What has passed is kept in the user's cache folder, by all that it depends on. What has not is held
against transformers again the next time: that takes a second, and its cause may be gone by then.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from heteropp.api.errors import InputError
from heteropp.description.files import cache_folder
from heteropp.description.kept import digest_of_code, read_entries, write_entries
from heteropp.models.spec import ModelError, ModelSpec

if TYPE_CHECKING:
    from heteropp.models.hugging_face.check import Check
    from heteropp.models.hugging_face.model import HuggingFaceModel

FAMILY = "hugging_face"
SOURCES = (
    *("models/hugging_face", "models/parallel", "models/parted", "models/stage_module"),
    *("models/attention", "models/documents", "models/fused_attention"),
    *("layout/boxes", "layout/parameter", "description/kept"),
)
LARGEST_GROUP = 8  # ranks, each a thread of the check


def prove(models: Iterable[tuple[ModelSpec, Iterable[tuple[int, bool]]]]) -> None:
    """Has each model of a family that transformers knows pass at its degrees.

    models: with the degrees of tensor parallelism that it is trained with, and whether that is
    with sequence parallelism. Raises InputError, which names the first parameter that differs.
    """
    for model, degrees in models:
        if model.family != FAMILY:
            continue
        for tp, sequence_parallel in sorted({(_provable(tp), sp) for tp, sp in degrees}):
            check = proved(model, tp, sequence_parallel)  # type: ignore[arg-type]
            if not (check.passed or check.is_refused):
                also = " and sequence parallelism" if sequence_parallel else ""
                raise InputError(
                    f"model {model.name} is not trained, as its family made small does not compute "
                    f"what transformers does with tensor-parallel degree {tp}{also}: "
                    f"{check.explain()}"
                )


def proved(model: HuggingFaceModel, tp: int, sequence_parallel: bool = False) -> Check:
    """Returns how a model's family made small compares, as it is known or by comparing it.

    Raises InputError where that cannot be found out.
    """
    from heteropp.models.hugging_face.check import Check, check

    path, key = _path(model), f"tp {tp}{', sequence parallel' if sequence_parallel else ''}"
    known = read_entries(path)
    try:
        if (found := Check(**known[key])).passed:
            return found
    except (LookupError, TypeError):
        pass  # not known
    try:
        found = check(model.config.values(), tp, sequence_parallel, model.config.code)
    except ModelError as error:
        raise InputError(
            f"model {model.name} cannot be held against transformers: {error}"
        ) from error
    if found.passed:
        write_entries(path, {**read_entries(path), key: asdict(found)})
    return found


def _provable(tp: int) -> int:
    """Returns the largest power of two that is no more: what small sizes can be cut into."""
    return 1 << min(tp, LARGEST_GROUP).bit_length() - 1


def _path(model: HuggingFaceModel) -> Path:
    digest = hashlib.sha256(digest_of_code(SOURCES))
    digest.update(f"{version('transformers')}\n{model.config.text}".encode())
    if (code := model.config.code) is not None:
        digest.update(code.sha256.encode())
    kind = re.sub(r"[^A-Za-z0-9_.-]", "-", str(model.config.values().get("model_type")))
    return cache_folder() / "proofs" / f"{kind}-{digest.hexdigest()[:24]}.json"
