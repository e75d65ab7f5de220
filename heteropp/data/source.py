"""What a run's --data names: a token file, or a folder of text, whose bytes become one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from heteropp.data.convert import convert
from heteropp.data.documents import find_files, read_documents
from heteropp.data.sequences import AttentionWithin, Sequences
from heteropp.data.token_file import VERSION, TokenFile, open_token_file
from heteropp.data.tokenizer import Bytes
from heteropp.data.whole_documents import WholeDocuments
from heteropp.description.files import FileError, cache_folder, make_folder
from heteropp.models.spec import ModelSpec


def open_tokens(source: Path | None, cache: Path | None = None) -> TokenFile:
    """The tokens of a file or folder, or of the Python standard library's sources for None.

    A folder's token file is made in the cache when it is missing; ranks that come at once wait for
    the first. Raises FileError when there is no text, or a file cannot be read or written.
    """
    if source is not None and not source.is_dir():
        return open_token_file(source)
    folder = source or Path(sysconfig.get_paths()["stdlib"])
    files = find_files([folder], ".py" if source is None else "")
    cache = cache or cache_folder()
    make_folder(cache)
    try:
        path = cache / f"{_key(folder, files)}.tokens"
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                documents = read_documents(files)
                first = next(documents, None)
                if first is None:
                    raise FileError(f"{folder} has no text files")
                convert(chain([first], documents), path, Bytes())
    except OSError as error:
        raise FileError(f"{error.filename} cannot be used: {error.strerror}") from None
    return replace(open_token_file(path), path=folder)


def check_data(
    data: Path | None,
    validation: Iterable[Path],
    model: ModelSpec,
    within: AttentionWithin,
    mixed_lengths: bool = False,
) -> TokenFile:
    """Opens a run's data, which its model must be able to learn. Raises FileError."""

    def check(tokens: TokenFile) -> None:
        if mixed_lengths:
            WholeDocuments(tokens, model)
        else:
            Sequences(tokens, model, within=within)

    tokens = open_tokens(data)
    check(tokens)
    for each in validation:
        others = open_tokens(each)
        check(others)
        if others.tokenizer_sha256 != tokens.tokenizer_sha256:
            raise FileError(
                f"{each} was made with tokenizer {others.tokenizer}, and what is trained on "
                f"with {tokens.tokenizer}; expected the same"
            )
    return tokens


def _key(folder: Path, files: list[Path]) -> str:
    """Returns a key of a folder's files that changes when any of them changes."""
    key = hashlib.sha256(VERSION.encode() + os.fsencode(folder.resolve()))
    for file in files:
        status = file.stat()
        key.update(os.fsencode(file))
        key.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return key.hexdigest()
