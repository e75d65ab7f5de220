"""JSON in the user's cache folder that can be made again: files of entries by key.

A file's first line has a digest of the others: one that is broken, or not what it says, is as good
as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heteropp.description.files import FileError, write_text
from hyperhetero.garbage import collecting

FORMAT = 2


def read_entries(path: Path) -> dict[str, Any]:
    """Returns a file's entries; none where it is not as it was written."""
    try:
        text = path.read_text()
        head, body = text.split("\n", 1)
        if head != _head(body):
            return {}
        with collecting(False):
            entries = json.loads(text)["entries"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_entries(path: Path, entries: dict[str, Any]) -> None:
    """Writes a file whole; one that cannot be written is left out, and made again next time."""
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(entries[key], separators=(',', ':'))}"
        for key in sorted(entries)
    )
    body = f'"entries": {{\n{lines}\n}}}}\n'
    with contextlib.suppress(FileError):
        write_text(path, f"{_head(body)}\n{body}")


def _head(body: str) -> str:
    return f'{{"format": {FORMAT}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}",'


@cache
def digest_of_code(sources: tuple[str, ...]) -> bytes:
    """Returns a digest of the versions of torch and transformers, and of sources of ours.

    sources: modules of heteropp, such as "layout/boxes", or folders of them.
    """
    torch = find_spec("torch")  # which does not import it
    assert torch is not None and torch.origin is not None
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in (Path(torch.origin).parent / "version.py", *_files(root, sources)):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    with contextlib.suppress(PackageNotFoundError):
        digest.update(version("transformers").encode())
    return digest.digest()


def _files(root: Path, sources: Iterable[str]) -> Iterable[Path]:
    for source in sources:
        folder = root / source
        yield from sorted(folder.glob("*.py")) if folder.is_dir() else [root / f"{source}.py"]
