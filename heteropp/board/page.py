"""Joins the page's files to one HTML file, which needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_STATIC = Path(__file__).parent / "static"
_STYLES = ("vendor/uPlot.min.css", "page.css")
_SCRIPTS = (
    *("vendor/uPlot.iife.min.js", "format.js", "charts.js", "timeline.js", "cluster.js"),
    "page.js",
)


def render(data: dict[str, Any] | None) -> str:
    """The whole page; data: what it shows, or None where it asks the server that gave it."""
    script = "\n".join((_STATIC / name).read_text("utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # a "<" inside a script could end it
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    environment = Environment(
        loader=FileSystemLoader(_STATIC), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        style=Markup("\n".join((_STATIC / name).read_text("utf-8") for name in _STYLES)),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        data=Markup(content),
    )
