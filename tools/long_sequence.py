"""A sequence that no chip of the quickstart holds whole: planned, trained and held to its plan.

Eight of the quickstart's chips A have sequences of 32,768 tokens to train. The default planner says
by how much they do not fit whole, with every score kept and in one kernel; where it may cut them,
its plan is trained, and its step and each rank's peak memory are held against what was predicted.
The chips keep their memory and are so much slower that this host computes a step in its time.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from evidence import Row, row, show
from trained import TrainingError, start, well_paced

import ditorch.chips
from dicomm.bench.quiet import Watch
from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, DoesNotFitError, Request
from hyperhetero.cli import CommandLine
from hyperhetero.progress import Status

CHIPS = 8
MODEL = LlamaModel(
    name="long",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=1,
    intermediate=192,
    vocab=256,
    sequence_length=32_768,
    attention="fused",
)
GLOBAL_BATCH = 2
MOST_PARTS = 4
MOST_STEP_ERROR = 2.0  # percent
MOST_MEMORY_ERROR = 5.0  # percent, below the prediction

app = CommandLine()


@app.command(help=__doc__, epilog="Example:  tools/long-sequence --steps 3 --json")
def main(
    steps: Annotated[int, typer.Option(min=2, help="Steps; the first warms up.")] = 3,
    slower: Annotated[
        float, typer.Option(min=1, help="Times as slow chips and links as the quickstart's.")
    ] = 4.5,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="long-sequence-") as name, Status("planning") as status:
        folder = Path(name)
        cluster = _cluster(folder, slower)
        request = Request(
            cluster=cluster, model=MODEL, global_batch=GLOBAL_BATCH, open=frozenset(OPTIONS)
        )
        try:
            explicit = replace(request, model=replace(MODEL, attention="explicit"))
            rows = [_lacking("every score kept", explicit), _lacking("one kernel", request)]
            in_parts = replace(request, context_parallel=MOST_PARTS, token_slices=1)
            judged = ask("auto", in_parts, 1).best
            status.update(f"training steps of {judged.simulation.step_s:.0f} s")
            watch.spin()
            rows += _trained(judged.plan, judged.simulation.step_s, cluster, folder, steps)
        except TrainingError as error:
            print(f"long-sequence: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        watch.spin()
    notes = [
        f"chips compute and links move bytes {slower:g} times as slowly as a-mini's; memory and "
        "latencies are its own",
        "steps whose pacing fidelity is below 95% are not used; peaks are of all steps",
    ]
    show("long-sequence", rows, notes, json, watch.result())


def _cluster(folder: Path, slower: float) -> Cluster:
    """One node of slower chips."""
    text = (Path(ditorch.chips.__file__).parent / "a-mini.toml").read_text()

    def slowed(found: re.Match[str]) -> str:
        return f"{found[1]}{float(found[2]) / slower:g}"

    (folder / "slow.toml").write_text(re.sub(r"(\w+(?:_flops|_per_s) *= )(\S+)", slowed, text))
    path = folder / "cluster.toml"
    path.write_text(f'name = "long"\n[[nodes]]\nchip = "slow.toml"\nchips = {CHIPS}\n')
    return read_cluster(path)


def _lacking(how: str, request: Request) -> Row:
    """What a chip lacks where sequences stay whole. Raises TrainingError where they fit."""
    error = ask("auto", replace(request, context_parallel=1)).error
    if not isinstance(error, DoesNotFitError):
        raise TrainingError(f"whole sequences were to fit no chip, with {how}: {error}")
    needed_bytes = max(memory.total for memory in rank_memory(error.plan, request.cluster))
    capacity_bytes = request.cluster.nodes[0].chip.memory.capacity_bytes
    lacking_mib = (needed_bytes - capacity_bytes) / 2**20
    return row(f"whole sequences, {how}: lacking", "MiB", lacking_mib)


def _trained(
    plan: Plan, simulated_s: float, cluster: Cluster, folder: Path, steps: int
) -> list[Row]:
    """Raises TrainingError."""
    limit_s = 600 + 3 * steps * simulated_s
    training = start(plan, folder / "cluster.toml", folder / "run", steps, limit_s=limit_s)
    every = training.all_steps()
    metrics = every[1:]
    paced = well_paced(metrics)
    measured_s = statistics.median(step["step_s"] for step in paced)
    peaks = [max(of_rank) for of_rank in zip(*(s["peak_memory_bytes"] for s in every), strict=True)]
    predicted = [memory.total for memory in rank_memory(plan, cluster)]
    shares = [100 * (1 - ours / most) for ours, most in zip(peaks, predicted, strict=True)]
    parts = max(stage.cp for stage in plan.pipelines[0].stages)
    return [
        row("parts of a sequence, most of a stage", "parts", parts),
        row("step, measured", "s", measured_s, peer=simulated_s, peer_name="simulated"),
        row("step, off the simulation", "%", 100 * abs(measured_s / simulated_s - 1),
            bar=MOST_STEP_ERROR),
        row("steps that are used", "%", 100 * len(paced) / len(metrics)),
        row("pacing fidelity, least", "%", 100 * min(step["pacing_fidelity"] for step in metrics)),
        row("peak memory below the prediction, most", "of it, %", max(shares),
            bar=MOST_MEMORY_ERROR),
        row("peak memory above the prediction, most", "of it, %", max(0.0, *(-s for s in shares)),
            bar=0.0),
    ]  # fmt: skip


if __name__ == "__main__":
    app()
