"""Clusters and models to start from, by name: those of the papers, and one for a laptop.

`clusters/NAME.toml` and `models/NAME.toml` hold them, each with its source and what it assumes;
`measured/NAME.toml` what real machines took, as published.
"""

from __future__ import annotations

import os
from pathlib import Path

from heteropp.description.files import FileError

_FOLDER = Path(__file__).parent


def cluster_names() -> list[str]:
    return _names("clusters")


def model_names() -> list[str]:
    return _names("models")


def cluster_path(name_or_path: str | Path) -> Path:
    """Returns the file of a cluster preset, or the path as it is. Raises FileError."""
    return _path("cluster", name_or_path)


def model_path(name_or_path: str | Path) -> Path:
    """Returns the file of a model preset, or the path as it is. Raises FileError."""
    return _path("model", name_or_path)


def measured_names() -> list[str]:
    return _names("measured")


def measured_path(name_or_path: str | Path) -> Path:
    """Returns the file of published measurements, or the path as it is. Raises FileError."""
    return _path("measured", name_or_path)


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_FOLDER / folder).glob("*.toml"))


def _path(kind: str, name_or_path: str | Path) -> Path:
    folder = kind if kind == "measured" else f"{kind}s"
    names, path = _names(folder), Path(name_or_path)
    if str(name_or_path) in names:
        return _FOLDER / folder / f"{name_or_path}.toml"
    is_name = path.name == str(name_or_path) and not path.suffix
    if is_name and not os.path.lexists(path):
        raise FileError(
            f"{kind} {str(name_or_path)!r}: expected the path of a {kind} file or one of "
            + ", ".join(names)
        )
    return path
