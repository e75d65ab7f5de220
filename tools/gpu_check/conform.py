"""Step 2: PyTorch's operator database on the GPU, against the CPU, for a limited time."""

from __future__ import annotations

import os
from pathlib import Path

from evidence import row

from gpu_check.part import Found, Part
from gpu_check.processes import run

WITHIN_S, REHEARSED_S = 65, 2
MOST_WORKERS = 8  # each has a context on the GPU
BAR = 99.0  # percent of supported samples, as ditorch-align conform asks for


def found(part: Part, folder: Path) -> Found:
    from ditorch.conform.results import read_conformance

    output = folder / "conformance.json"
    within_s = REHEARSED_S if part.is_rehearsed else WITHIN_S
    run(
        "ditorch_align", "conform", "--output", output, "--samples", 1, "--within", within_s,
        "--deadline", 30, "--workers", max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2)),
        environment=part.environment,
        may_end_with=(0, 1),
    )  # fmt: skip
    result = read_conformance(output)
    samples, checks = result.tally, result.check_tally
    supported = checks.passed + checks.failed
    rows = [
        row("conform: supported samples within the standard", "%", 100 * result.pass_rate,
            bar=BAR, better="higher"),
        row("conform: supported samples tried", "samples", samples.supported, better="higher"),
        row("conform: runtime checks that pass", "checks", checks.passed, bar=supported,
            better="higher"),
    ]  # fmt: skip
    notes = [f"conform: {result.left_out} operators and checks had no time"]
    failed = [f"{name} {outcome.dtype}" for name, outcome in result.problems("failed")]
    failed += [f"{each.group}: {each.name}" for each in result.checks if each.status == "failed"]
    if failed:
        notes.append(f"conform: failed are {', '.join(dict.fromkeys(failed))}")
    return Found(rows, notes)
