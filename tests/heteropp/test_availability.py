"""The file that says which chips there are, while somebody writes it."""

from __future__ import annotations

import time
from pathlib import Path

from heteropp.description.cluster import read_cluster
from heteropp.elastic.launcher.availability import Availability


def test_a_file_that_is_emptied_takes_no_chip_away(tmp_path: Path) -> None:
    file = tmp_path / "chips.json"
    file.write_text('{"a-mini-0": 2, "b-mini-0": 1}')
    read = Availability(str(file), read_cluster("quickstart"))
    try:
        file.write_text("")  # what `echo ... >chips.json` does before it writes
        while (warning := read.take_warning()) is None:
            time.sleep(0.05)
        assert warning == f"{file} is empty; expected chips by node, or {{}} for none"
        assert read.chips == {"a-mini-0": 2, "b-mini-0": 1}
        file.write_text("{}")
        while read.chips:
            time.sleep(0.05)
    finally:
        read.close()
