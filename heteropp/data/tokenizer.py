"""Text to tokens: its bytes, or what a Hugging Face tokenizer.json makes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from heteropp.data.documents import Document
from heteropp.description.files import FileError, read_bytes


@dataclass(frozen=True)
class Encoded:
    """A document's tokens."""

    tokens: np.ndarray  # [tokens] of any integer type, with what marks the document's end
    # which tokens are learnt, [ranges, 2] of begins and ends, ascending; None: all that follow
    # from another
    answers: np.ndarray | None = None


class Tokenizer(Protocol):
    name: str
    sha256: str  # of what it is made from
    vocabulary: int  # every token is below it

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Returns each document's tokens. Raises FileError."""


class Bytes:
    """One token a byte; token 0, which text does not have, ends a document."""

    name = "bytes"
    sha256 = hashlib.sha256(b"bytes").hexdigest()
    vocabulary = 256

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        return [Encoded(np.frombuffer(each.text + b"\0", np.uint8)) for each in documents]


class HuggingFace:
    """A tokenizer.json. Tokens that it puts around a text itself, such as Llama's first, stay."""

    def __init__(self, path: Path, end: str | None = None) -> None:
        """`end` is the token after each document; None: the eos_token of the tokenizer_config.json
        beside it, if any. Raises FileError.
        """
        if path.is_dir():
            path = path / "tokenizer.json"
        content = read_bytes(path)
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises Exception itself
            raise FileError(f"{path} is not a tokenizer.json: {error}") from None
        self.name = path.absolute().parent.name + "/" + path.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        if not self.vocabulary:
            raise FileError(f"{path} has an empty vocabulary")
        end = end if end is not None else _eos_token(path.with_name("tokenizer_config.json"))
        if end and end not in ids:
            raise FileError(f"{path} has no token {end!r} to end documents with")
        self.end = ids[end] if end else None
        # the whole document counts, whatever the file says of a model's longest input
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        texts = []
        for document in documents:
            try:
                texts.append(document.text.decode())
            except UnicodeDecodeError:
                raise FileError(f"{document.where} is not UTF-8 text") from None
        encodings = self.tokenizer.encode_batch_fast(texts)
        return [Encoded(self._tokens(encoding.ids)) for encoding in encodings]

    def _tokens(self, ids: list[int]) -> np.ndarray:
        if self.end is not None and ids[-1:] != [self.end]:  # some put it there themselves
            ids = [*ids, self.end]
        return np.array(ids, np.uint32)


def _eos_token(path: Path) -> str | None:
    """What a tokenizer_config.json says ends a text; None where there is none."""
    try:
        config: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read as JSON: {error}") from None
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):  # an added token with its properties
        token = token.get("content")
    return token if isinstance(token, str) else None
