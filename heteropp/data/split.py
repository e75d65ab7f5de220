"""Long documents into several, so that some of them can be held out, or none is cut in training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from heteropp.data.documents import Document

CONTINUES = range(0x80, 0xC0)  # the bytes of UTF-8 that no character begins with


def split(documents: Iterable[Document], longest_bytes: int) -> Iterator[Document]:
    """Yields the documents in pieces of at most so many bytes of text, in order.

    A piece ends behind a line, or else behind a space, or else between two characters.
    """
    for document in documents:
        begin, text = 0, document.text
        while len(text) - begin > longest_bytes:
            end = _end(text, begin, begin + longest_bytes)
            yield Document(text[begin:end], document.where)
            begin = end
        yield Document(text[begin:], document.where) if begin else document


def _end(text: bytes, begin: int, most: int) -> int:
    """Returns where a piece that begins there ends, at `most` or before."""
    for mark in (b"\n", b" "):
        if (found := text.rfind(mark, begin, most)) >= 0:
            return found + 1
    end = most
    while end > begin and text[end] in CONTINUES:
        end -= 1
    return end if end > begin else most  # it is not UTF-8
