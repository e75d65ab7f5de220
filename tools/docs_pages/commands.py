"""The commands of pyproject.toml, and the page that shows them, made of their --help."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
HEAD = """# Commands

Every command has `--help`, from which this page is made. Bad input gives one sentence and exit
code 2.
"""


@cache
def commands() -> dict[str, Any]:
    """Returns every command by its name, and the subcommands by both: `dicomm topo`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    found: dict[str, Any] = {}
    for name, entry in sorted(scripts.items()):
        module = import_module(entry.partition(":")[0])
        app = module.app if hasattr(module, "app") else import_module(f"{module.__name__}.cli").app
        found[name] = command = typer.main.get_command(app)
        subcommands = getattr(command, "commands", {})
        found |= {f"{name} {word}": subcommands[word] for word in sorted(subcommands)}
    return found


def options(name: str) -> set[str]:
    """Returns the options of a command, or of all its subcommands, with their dashes."""
    own = [
        command
        for known, command in commands().items()
        if known == name or known.startswith(f"{name} ")
    ]
    return {text for command in own for text in _dashed(command)} | {"--help"}


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([HEAD, *(line for name in commands() for line in _section(name))])


def _dashed(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (text for text in parameter.opts + parameter.secondary_opts if text[0] == "-")


def _section(name: str) -> Iterator[str]:
    command = commands()[name]
    context = command.context_class(command, info_name=name)
    yield f"{'###' if ' ' in name else '##'} {name}\n"
    yield f"{_plain(command.help)}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(parameter)
    for panel, parameters in panels.items():
        yield from _table(panel or "Options", parameters, context)
    if command.epilog:
        yield f"```text\n{command.epilog.replace(chr(8), '').strip()}\n```\n"


def _table(title: str, parameters: list[Any], context: Any) -> Iterator[str]:
    records = [record for p in parameters if (record := p.get_help_record(context)) is not None]
    if records:
        yield f"| {title} | |\n|---|---|"
        for form, says in records:
            yield f"| `{_cell(form)}` | {_cell(escaped(says))} |"
        yield ""


def _plain(text: str | None) -> str:
    """The paragraphs without the marks that keep click from filling them anew."""
    return escaped((text or "").replace("\b", "").strip())


def escaped(text: str) -> str:
    return re.sub(r"([\[\]*_])", r"\\\1", text.replace("<", "&lt;"))


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "\\|"))
