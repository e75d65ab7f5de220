"""The token file: the tokens of many documents, one after another, to be mapped into memory.

It is a safetensors file, which any language reads:

    tokens     [tokens]     the narrowest unsigned integers that hold the vocabulary; up to 7 bytes
                            of zeros follow the last document
    documents  [documents]  int64: where each document ends, in tokens
    answers    [answers, 2] int64, of conversations alone: where each answer begins and ends, in
                            tokens; no other token is learnt
    metadata                version, tokenizer and its digest, vocabulary, sha256 of all tensors

Version 1 had no answers, and is read as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from heteropp.description.files import FileError

FORMAT = "hyperhetero tokens"
VERSION = "2"
VERSIONS = ("1", VERSION)  # that are read
DTYPES = {name: np.dtype(f"u{size}") for name, size in (("U8", 1), ("U16", 2), ("U32", 4))}


@dataclass(frozen=True)
class TokenFile:
    """A mapped token file."""

    path: Path  # or of the folder of text that it was made of
    tokens: np.ndarray  # [tokens]
    ends: np.ndarray  # [documents] int64, ascending; the last is the number of tokens
    tokenizer: str
    tokenizer_sha256: str
    vocabulary: int  # every token is below it
    sha256: str  # of all tensors, the same wherever the file lies
    # of conversations: where answers, which alone are learnt, begin and end, [answers, 2] int64,
    # ascending
    answers: np.ndarray | None = None


def open_token_file(path: Path) -> TokenFile:
    """Maps a file that heteropp-data wrote. Raises FileError for any other, and a torn one."""
    try:
        path.stat()
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise FileError(f"{path} is no token file; {_how_to_make(path)}")
            if metadata["version"] not in VERSIONS:
                raise FileError(
                    f"{path}: version is {metadata['version']}; this release reads "
                    f"{' and '.join(VERSIONS)}"
                )
            dtype = DTYPES[file.get_slice("tokens").get_dtype()]
            padded = file.get_slice("tokens").get_shape()[0]
            documents = file.get_slice("documents").get_shape()[0]
            has_answers = "answers" in file.keys()  # noqa: SIM118 - it is no dictionary
            answers = file.get_slice("answers").get_shape() if has_answers else None
        with open(path, "rb") as content:
            begin = 8 + int.from_bytes(content.read(8), "little")  # the header's length, then it
        tokens = np.memmap(path, dtype, "r", begin, (padded,))
        begin += tokens.nbytes
        ends = np.memmap(path, np.int64, "r", begin, (documents,))
        begin += ends.nbytes
        return TokenFile(
            path,
            tokens[: ends[-1]],
            ends,
            metadata["tokenizer"],
            metadata["tokenizer_sha256"],
            int(metadata["vocabulary"]),
            metadata["sha256"],
            np.memmap(path, np.int64, "r", begin, tuple(answers)) if answers else None,
        )
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise FileError(
            f"{path} is no token file, or a damaged one ({error}); {_how_to_make(path)}"
        ) from None
    except (KeyError, IndexError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} is a damaged token file: {error!r}") from None


def _how_to_make(path: Path) -> str:
    return f"of text, `heteropp-data {path} -o {path.with_suffix('.tokens').name}` makes one"
