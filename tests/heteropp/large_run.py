"""The metrics of a run on many chips and of many steps."""

from __future__ import annotations

import random
from pathlib import Path


def write_large_run(run: Path, ranks: int, steps: int) -> None:
    figures = random.Random(0)
    memory = ", ".join(str(figures.randrange(1 << 36)) for _ in range(ranks))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss, norm = 2 + 8 / step**0.5 + figures.random() / 9, figures.random()
            file.write(
                f'{{"step": {step}, "loss": {loss}, "gradient_norm": {norm}, '
                f'"tokens_per_s": {1e6 + 1e5 * norm}, "peak_memory_bytes": [{memory}]}}\n'
            )
