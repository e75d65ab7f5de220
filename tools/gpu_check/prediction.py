"""Step 6: how well heteropp-profile's measurements of the GPU alone predict it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from evidence import row

from gpu_check.part import Found, Part
from gpu_check.processes import run
from gpu_check.training import MODEL, STEPS, measure, metrics, search, step_rows, write_cluster


def found(part: Part, folder: Path) -> Found:
    cluster = write_cluster(folder, "gpu-alone", part.chip)
    profile, plan, output = (folder / name for name in ("gpu.json", "gpu-plan.json", "gpu-run"))
    measure(cluster, part.chip, profile, part.environment)
    search(cluster, profile, plan)
    run(
        "heteropp.cli.train", "--cluster", cluster, "--plan", plan, "--steps", STEPS,
        "--output", output,
        environment=part.environment,
    )  # fmt: skip
    said = run(
        "heteropp.cli.profile", "--cluster", cluster, "--model", MODEL, "--kernels",
        folder / "chips", "--json",
        environment=part.environment,
    )  # fmt: skip
    (chip,) = json.loads(said).values()
    errors = [100 * abs(each["error"]) for each in chip["operators"] if not each["fit"]]
    rows = [
        *step_rows("the GPU alone", metrics(output)),
        row("kernels: median error of operators that were not fitted", "%",
            statistics.median(errors)),
        row("kernels: worst error of operators that were not fitted", "%", max(errors)),
    ]  # fmt: skip
    return Found(rows, [])
