"""Looks at every link of every Markdown file of the repository, where mkdocs sees only docs/."""

from __future__ import annotations

import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import markdown
from pymdownx.slugs import slugify

EXTENSIONS = ["tables", "fenced_code", "toc"]
SLUGS = {"toc": {"slugify": slugify(case="lower")}}  # GitHub's, and mkdocs.yml's


class _Page(HTMLParser):
    """Collects where a page's links lead, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        text = path.read_text(encoding="utf-8")
        self.feed(markdown.markdown(text, extensions=EXTENSIONS, extension_configs=SLUGS))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value is not None:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(root: Path) -> list[str]:
    """Returns a sentence for each link that leads nowhere; of external ones the form is read."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    pages = [root / name for name in names.splitlines() if (root / name).exists()]
    return [
        f"{page.relative_to(root)} links to {target}: {wrong}"
        for page in pages
        for target in _parsed(page).targets
        if (wrong := _wrong(target, page)) is not None
    ]


@cache
def _parsed(path: Path) -> _Page:
    return _Page(path)


def _wrong(target: str, page: Path) -> str | None:
    """What is wrong with a link of the page; None if nothing is."""
    link = urlsplit(target)
    if link.scheme == "mailto":
        return None if "@" in link.path else "an address with @ was expected"
    if link.scheme or link.netloc:
        well_formed = link.scheme in ("http", "https") and "." in (link.hostname or "")
        return None if well_formed else "an address like https://host.domain/path was expected"
    file = (page.parent / unquote(link.path)).resolve() if link.path else page
    if not file.exists():
        return "there is no such file"
    if link.fragment and file.suffix == ".md" and link.fragment not in _parsed(file).anchors:
        return f"{file.name} has no heading #{link.fragment}"
    return None
