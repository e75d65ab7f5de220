"""Documents of text, JSONL and Parquet files, one after another."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from heteropp.data.messages import conversation_text
from heteropp.description.files import FileError

PIECE_BYTES = 1 << 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
Progress = Callable[[int], None]  # called with the bytes read since the last call
Encode = Callable[[object, str, str], bytes]  # a value, its field, and where it stands, to text


@dataclass(frozen=True)
class Document:
    text: bytes
    where: str  # its file, and its line or row there


def find_files(sources: Sequence[Path], suffix: str = "") -> list[Path]:
    """Returns the files among the sources, and the files beneath the folders, sorted and without
    hidden ones.

    Folders that are symbolic links beneath a source are left out. Raises FileError for what is not
    there or cannot be read.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            try:
                found += _beneath(source, suffix)
            except OSError as error:
                raise FileError(f"{error.filename} cannot be read: {error.strerror}") from None
        else:
            found.append(source)
            _check_there(source)
    return found


def _check_there(source: Path) -> None:
    try:
        source.stat()
    except FileNotFoundError:
        raise FileError(f"{source} is not there; expected a file or a folder of text") from None
    except OSError as error:
        raise FileError(f"{source} cannot be read: {error.strerror}") from None


def size_bytes(files: Sequence[Path]) -> int:
    """Returns the size of all files together. Raises FileError for one that has gone."""
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise FileError(f"{error.filename} cannot be read: {error.strerror}") from None


def read_documents(
    files: Sequence[Path],
    field: str = "text",
    separator: str = "",
    progress: Progress = lambda _: None,
    conversations: bool = False,
) -> Iterator[Document]:
    """Yields the documents of the files that are not empty, in order.

    Each line of a .jsonl file and each row of a .parquet file is a document, the text of its
    `field`. Any other file is one document, or several between separators. Files that end in .gz
    are unpacked. Files with a zero byte in their first MiB are no text and are skipped.
    conversations: the `field` holds messages, and not text. Raises FileError, which names the line
    or row.
    """
    encode = conversation_text if conversations else _encoded
    for file in files:
        try:
            kind = file.with_suffix("") if file.suffix == ".gz" else file
            if file.suffix == ".parquet":
                found = _parquet(file, field, encode, progress)
            elif kind.suffix == ".jsonl":
                found = _jsonl(file, field, encode, progress)
            elif conversations:
                raise FileError(f"{file} is no .jsonl, .jsonl.gz or .parquet file of conversations")
            else:
                found = _text(file, separator.encode(), progress)
            yield from (document for document in found if document.text)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"{file} cannot be read: {reason}") from None


def _beneath(folder: Path, suffix: str) -> Iterator[Path]:
    """Yields the files beneath a folder, sorted, without hidden ones.

    It skips packages that are installed beneath the standard library, which are not part of it.
    Raises OSError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(n for n in folders if n not in SKIPPED_FOLDERS and n[0] != ".")
        for name in sorted(names):
            path = Path(parent, name)
            if name.endswith(suffix) and name[0] != "." and path.is_file():
                yield path


def _text(file: Path, separator: bytes, progress: Progress) -> Iterator[Document]:
    with open(file, "rb") as raw, _unpacked(file, raw) as content:
        first, read = content.read(PIECE_BYTES).removeprefix(codecs.BOM_UTF8), 0
        if b"\0" in first:
            return
        pieces = chain([first], iter(lambda: content.read(PIECE_BYTES), b""))
        for text in _split(pieces, separator) if separator else [b"".join(pieces)]:
            yield Document(text, str(file))
            progress(raw.tell() - read)
            read = raw.tell()


def _split(pieces: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    left = bytearray()
    for piece in pieces:
        begin = max(0, len(left) - len(separator) + 1)
        left += piece
        while (end := left.find(separator, begin)) >= 0:
            yield bytes(left[:end])
            del left[: end + len(separator)]
            begin = 0
    yield bytes(left)


def _jsonl(file: Path, field: str, encode: Encode, progress: Progress) -> Iterator[Document]:
    with open(file, "rb") as raw, _unpacked(file, raw) as content:
        read = 0
        for number, line in enumerate(content, 1):
            where = f"{file}:{number}"
            if line.strip():
                yield Document(encode(_field(line, field, where), field, where), where)
            progress(raw.tell() - read)
            read = raw.tell()


def _field(line: bytes, field: str, where: str) -> object:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise FileError(f"{where} is not a JSON object")
    return row.get(field)


def _parquet(file: Path, field: str, encode: Encode, progress: Progress) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise FileError(
            f"{file} needs pyarrow, which is not installed: pip install 'hyperhetero[parquet]'"
        ) from None
    try:
        with ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                raise FileError(f"{file} has no column {field!r}; {_other_fields(table)}")
            row, share = 0, file.stat().st_size // max(1, table.metadata.num_rows)
            for batch in table.iter_batches(1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    where = f"{file}, row {row}"
                    yield Document(encode(value, field, where), where)
                progress(share * len(batch))
    except (ArrowException, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{file} is not a Parquet file that can be read: {error}") from None


def _other_fields(table: Any) -> str:
    return f"it has {', '.join(table.schema_arrow.names)}: choose one with --field"


def _encoded(value: object, field: str, where: str) -> bytes:
    if not isinstance(value, str):
        kind = "missing" if value is None else f"of type {type(value).__name__}"
        raise FileError(f"{where}: {field!r} is {kind}; expected text (--field names another)")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise FileError(f"{where}: {field!r} has half of a surrogate pair") from None


def _unpacked(file: Path, raw: IO[bytes]) -> IO[bytes]:
    return gzip.open(raw) if file.suffix == ".gz" else raw  # type: ignore[return-value]
