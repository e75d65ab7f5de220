"""Documents to token files, some of them held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from heteropp.data.documents import Document
from heteropp.data.tokenizer import Tokenizer
from heteropp.data.writer import TokenWriter, token_writer
from heteropp.description.files import FileError

BATCH_BYTES = 1 << 20  # of text, given to the tokenizer at once, which has a thread a core


@dataclass(frozen=True)
class Written:
    """A token file that was made."""

    path: str
    documents: int
    tokens: int
    targets: int  # tokens that are learnt
    sha256: str


def convert(
    documents: Iterable[Document], output: Path, tokenizer: Tokenizer, hold_out: float = 0
) -> list[Written]:
    """Writes `output` and, of a share of the documents, the `validation_path` beside it.

    What is held out depends on a document's text alone, so that copies stay together. Raises
    FileError; then neither file is written, unless the second cannot take the name of an old one.
    """
    paths = [output, validation_path(output)] if hold_out else [output]
    with ExitStack() as stack:
        writers = [stack.enter_context(token_writer(path, tokenizer)) for path in paths]
        for batch in _batches(documents):
            for document, encoded in zip(batch, tokenizer.encode(batch), strict=True):
                writers[_is_held_out(document, hold_out)].append(encoded)
        for writer in writers:
            if not writer.tokens:
                why = _why(writers, hold_out)
                raise FileError(f"{writer.path} is not written: there is no text for it{why}")
        for writer in writers:  # before either has its name
            writer.finish()
    return [Written(str(w.path), len(w.ends), w.tokens, w.targets, w.sha256) for w in writers]


def validation_path(output: Path) -> Path:
    """corpus.validation.tokens, beside corpus.tokens."""
    return output.with_name(f"{output.stem}.validation{output.suffix}")


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _why(writers: list[TokenWriter], hold_out: float) -> str:
    """Returns what --hold-out made of documents that all went to one file."""
    documents = max(len(writer.ends) for writer in writers)
    if not documents:
        return ": all sources are empty, or no text because they hold zero bytes"
    return (
        f"; --hold-out takes whole documents, by a hash of their text, and of these {documents} "
        f"{hold_out:g} was all or none: give more documents, another share, or --longest, which "
        "splits long ones"
    )


def _is_held_out(document: Document, share: float) -> bool:
    if not share:
        return False
    digest = hashlib.sha256(document.text).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
