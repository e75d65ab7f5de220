"""A chip file of one's own for a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ditorch.chips import load_chip


@pytest.fixture
def make_chip(tmp_path: Path) -> Callable[..., Path]:
    """make_chip("b-mini", neutral="true") -> the path of that preset with those keys changed."""

    def make(preset: str, **values: str) -> Path:
        text = load_chip(preset).path.read_text()
        for key, value in values.items():
            text, changed = re.subn(rf"(?m)^{key}\s*=.*$", f"{key} = {value}", text)
            assert changed == 1, f"{preset} has no key {key}"
        path = tmp_path / f"{preset}-{'-'.join(values)}.toml"
        path.write_text(text)
        return path

    return make
