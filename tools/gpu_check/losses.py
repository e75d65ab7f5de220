"""Step 3: a small Llama's losses on the GPU, against the CPU's."""

from __future__ import annotations

import json
from pathlib import Path

from gpu_check.part import Found, Part
from gpu_check.processes import run

STEPS, REHEARSED_STEPS = 60, 6


def found(part: Part, folder: Path) -> Found:
    steps = REHEARSED_STEPS if part.is_rehearsed else STEPS
    said = run(
        "ditorch_align", "run", "--chips", part.align_name, "--reference", "cpu", "--steps", steps,
        "--tools", "", "--output", folder / "align", "--json",
        environment={},
        may_end_with=(0, 1),
    )  # fmt: skip
    (of_chip,) = json.loads(said)["rows"]
    return Found(
        [{**of_chip, "name": "losses: mean relative error against the CPU's", "peer_name": None}],
        [],
    )
