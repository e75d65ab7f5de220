"""What mkdocs is asked to do beside its own work, by the name of each event."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from docs_pages import commands
from docs_pages import files as written

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Links to files outside of docs/ serve readers in the repository; the site keeps the text."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        text, target = link.groups()
        if ":" in target or (folder / target).resolve().is_relative_to(docs):
            return link.group()
        return text

    address = Path(page.file.src_uri)
    if address.parent.name == "files":
        markdown += f"\n{written.keys(address.stem)}"
    return LINK.sub(kept, markdown)


def on_files(files: Any, *, config: Any) -> Any:
    """The pages that are made of the code stand beside those that are written."""
    for address, text in {"reference/commands.md": commands.page()}.items():
        files.append(File.generated(config, address, content=text))
    return files
