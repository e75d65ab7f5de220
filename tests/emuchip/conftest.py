from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emuchip_vendor import OK, Vendor, chip_text

Emulate = Callable[..., Vendor]


@pytest.fixture
def emulate(tmp_path: Path) -> Emulate:
    """emulate(preset, **changes): a vendor library that emulates the changed preset."""

    def load(preset: str = "a-mini", devices: str | None = None, **changes: Any) -> Vendor:
        chip_file = tmp_path / f"chip-{len(list(tmp_path.iterdir()))}.toml"
        chip_file.write_text(chip_text(preset, **changes))
        vendor = Vendor(tmp_path, chip_file, devices)
        assert vendor.count_status == OK, vendor.error()
        return vendor

    return load
