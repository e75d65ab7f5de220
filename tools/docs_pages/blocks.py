"""The code blocks of a Markdown page, as its reader would type them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.*) -->")
TITLE = re.compile(r'title="(?P<title>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line where it begins, and what is to be done with it."""

    language: str
    text: str
    line: int
    title: str | None  # the file that it is
    not_run: str | None  # the reason, of a block that is not run


def blocks(page: Path) -> list[Block]:
    """Returns the page's blocks in order."""
    found, comment = [], None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            assert token.map is not None
            title = TITLE.search(token.info)
            found.append(
                Block(
                    language=token.info.split(" ")[0],
                    text=token.content,
                    line=token.map[0] + 1,
                    title=title["title"] if title else None,
                    not_run=comment["reason"].strip() if comment else None,
                )
            )
        comment = NOT_RUN.match(token.content) if token.type == "html_block" else None
    return found
