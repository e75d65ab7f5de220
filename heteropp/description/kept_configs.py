"""What transformers says of a config.json, kept in the user's cache folder.

To find it out it is imported, with torch, and makes the whole model on meta: seconds, which a
search whose traces are kept does not have.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from heteropp.description.files import cache_folder
from heteropp.description.kept import digest_of_code, read_entries, write_entries
from heteropp.models.hugging_face.config import check_release
from heteropp.models.hugging_face.model import HuggingFaceModel

SOURCES = (  # of heteropp, which decide what is found
    *("description/kept", "description/kept_configs", "layout/boxes", "layout/parameter"),
    *("models/attention", "models/parallel/tensor_parallel", "models/hugging_face"),
    *("models/parted", "models/spec"),
)
KEY = "model"

_ADAPTER = TypeAdapter(HuggingFaceModel)


def fields_of(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says, as fields of HuggingFaceModel, but its name.

    Raises ModelError.
    """
    check_release()
    path = _path(values)
    try:
        kept = _ADAPTER.validate_json(json.dumps(read_entries(path)[KEY]))
    except (LookupError, ValidationError):
        from heteropp.models.hugging_face.reading import read

        kept = read(values, path.stem)
        write_entries(path, {KEY: _ADAPTER.dump_python(kept, mode="json")})
    return {each.name: getattr(kept, each.name) for each in fields(kept) if each.name != "name"}


def _path(values: dict[str, Any]) -> Path:
    digest = hashlib.sha256(digest_of_code(SOURCES))
    digest.update(json.dumps([version("transformers"), values], sort_keys=True).encode())
    return cache_folder() / "configs" / f"{digest.hexdigest()[:24]}.json"
