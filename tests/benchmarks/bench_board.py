"""The board: what a page waits for before it shows a run of 1,000 ranks and 10,000 steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from large_run import write_large_run

from heteropp.board.board import RunBoard
from heteropp.board.page import render


@pytest.mark.benchmark(group="board: 1,000 ranks, 10,000 steps")
def test_page(benchmark: Any, tmp_path: Path) -> None:
    write_large_run(tmp_path, ranks=1000, steps=10_000)

    def page() -> str:
        return render(RunBoard([tmp_path]).whole())

    assert json.dumps(str(tmp_path)) in benchmark.pedantic(page, rounds=3)
