"""Step 7: how well heteropp-profile's measurements of the GPU alone predict it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from evidence import row

from gpu_check.part import Found, Part
from gpu_check.processes import run
from gpu_check.training import MODEL, STEPS, measure, metrics, search, step_rows, write_cluster

# A GPU is busy with it, while the host issues the quickstart's small operators too slowly for one.
LARGE = """\
name            = "large"
layers          = {layers}
hidden          = {hidden}
heads           = {heads}
kv_heads        = {kv_heads}
intermediate    = {intermediate}
vocab           = 256
sequence_length = {sequence_length}
dtype           = "bfloat16"
attention       = "fused"
"""
ON_A_GPU = {
    "layers": 6,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "intermediate": 14336,
    "sequence_length": 4096,
}
REHEARSED = {
    "layers": 2,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 256,
    "sequence_length": 128,
}


def found(part: Part, folder: Path) -> Found:
    cluster = write_cluster(folder, "gpu-alone", part.chip)
    large = folder / "large.toml"
    large.write_text(LARGE.format(**(REHEARSED if part.is_rehearsed else ON_A_GPU)))
    rows = []
    for model in (large,) if part.is_rehearsed else (MODEL, large):
        rows += _trained(part, cluster, model)
    said = run(
        "heteropp.cli.profile", "--cluster", cluster, "--model", MODEL, "--kernels",
        folder / "chips", "--json",
        environment=part.environment,
    )  # fmt: skip
    (chip,) = json.loads(said).values()
    errors = [100 * abs(each["error"]) for each in chip["operators"] if not each["fit"]]
    rows += [
        row("kernels: median error of operators that were not fitted", "%",
            statistics.median(errors)),
        row("kernels: worst error of operators that were not fitted", "%", max(errors)),
    ]  # fmt: skip
    return Found(rows, [])


def _trained(part: Part, cluster: Path, model: Path | str) -> list[dict[str, Any]]:
    """The steps of a model on the GPU alone, as predicted from its profile and as measured."""
    name = Path(model).stem
    folder = cluster.parent
    profile, plan, output = (
        folder / f"{name}-{what}" for what in ("profile.json", "plan.json", "run")
    )
    measure(cluster, model, part.chip, profile, part.environment)
    search(cluster, model, profile, plan)
    run(
        "heteropp.cli.train", "--cluster", cluster, "--plan", plan, "--profile", profile,
        "--steps", STEPS, "--output", output,
        environment=part.environment,
    )  # fmt: skip
    steps = metrics(output)
    rows = step_rows(f"the GPU alone, {name} model", steps)
    if steps[-1]["utilization"] is not None:
        share = 100 * statistics.median(step["utilization"] for step in steps[1:])
        rows.append(row(f"the GPU alone, {name} model: model FLOPs utilization", "%", share,
                        better="higher"))  # fmt: skip
    return rows
