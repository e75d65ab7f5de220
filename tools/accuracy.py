"""Predicted against measured step time and peak memory, on emulated clusters made up by seed.

Makes clusters of 2 to 8 chips whose speeds, memory and links are random, plans a small Llama on
each of them, trains every plan for a few steps with heteropp-train, and holds what the plan says
against what the run took; on the first cluster, small models of four families that run by
transformers' modules, too. The chips are slow, so that the host's work fits inside their time; a
step whose pacing fidelity is below 95% is not used, and neither is a plan without such steps.
"""

from __future__ import annotations

import json as json_
import os
import platform
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import accuracy_real
import typer
from accuracy_families import FAMILIES, small_model
from trained import TrainingError, start, well_paced

from heteropp.cli.errors import one_sentence
from heteropp.cost.planned import rank_memory
from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.files import check_file, write_text
from heteropp.description.model import read_model
from heteropp.description.plan import Plan
from heteropp.models.llama.model import LlamaModel
from heteropp.models.spec import ModelSpec
from heteropp.search.planner import Request, SearchError, planner
from heteropp.simulator.simulate import simulate
from hyperhetero.cli import CommandLine, output_file

ROOT = Path(__file__).resolve().parents[1]
MODEL = LlamaModel(
    name="accuracy",
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=2,
    intermediate=192,
    vocab=256,
    sequence_length=128,
)
GLOBAL_BATCH = 8
ASKED = ("exact", "heteroauto", "uniform")  # planners
# at most, in percent: median and worst, of step time and of peak memory
BARS = {"step time": (2, 6), "peak memory": (2, 5)}
FAMILY_PLANS = 2
FAMILY_BARS = {"step time": 2, "peak memory": 5}  # the same of each plan of a family


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was predicted and measured of one plan."""

    cluster: str
    model: str
    plan: str
    ranks: int
    predicted_step_s: float
    measured_step_s: float  # median of the steps that count
    pacing_fidelity: float  # of those, the least
    predicted_memory_bytes: tuple[int, ...]  # by rank
    measured_memory_bytes: tuple[int, ...]

    @property
    def step_error(self) -> float:
        return self.predicted_step_s / self.measured_step_s - 1

    @property
    def memory_error(self) -> float:
        """The relative error of the predicted peak memory, on the rank where it is largest."""
        pairs = zip(self.predicted_memory_bytes, self.measured_memory_bytes, strict=True)
        return max((predicted / measured - 1 for predicted, measured in pairs), key=abs)


app = CommandLine()


@app.command()
def main(
    clusters: Annotated[int, typer.Option(min=1, help="How many to make up.")] = 6,
    plans: Annotated[int, typer.Option(min=1, help="How many on each.")] = 4,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps of each training; the first is not used.")
    ] = 4,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the clusters and of the choice of plans.")
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="A model as heteropp-search takes it; a small Llama if absent."),
    ] = None,
    families: Annotated[
        bool, typer.Option(help="Take small models of transformers' families, too.")
    ] = True,
    output: Annotated[
        Path | None, output_file("--output", "-o", help="Write the data here, and a PNG beside.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="Compare with published runs on real chips instead, and train nothing."
        ),
    ] = False,
) -> None:
    if real:
        accuracy_real.show(output, json)
        return
    with one_sentence():
        if output:
            check_file(output)  # it has a picture beside it
        planned = read_model(model) if model else MODEL
    others = [] if model or not families else [small_model(family) for family in FAMILIES]
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        for index in range(clusters):
            place = Path(folder) / str(index)
            generator = random.Random(f"{seed} {index}")
            cluster = read_cluster(_write_cluster(place, index, generator))
            chosen = _plans(cluster, planned, plans, generator)
            for other in others if index == 0 else ():
                chosen += _plans(cluster, other, FAMILY_PLANS, random.Random(f"{seed} families"))
            for number, plan in enumerate(chosen):
                try:
                    row = _run(plan, cluster, place, place / str(number), steps)
                except TrainingError as error:
                    failed.append(f"{cluster.name}, {_outline(plan)}: {error}")
                    print(failed[-1], file=sys.stderr)
                    continue
                rows.append(row)
                print(
                    f"{row.cluster}  {row.model}  {row.plan}: step {row.measured_step_s:.3f} s "
                    f"{row.step_error:+.2%}, memory {row.memory_error:+.2%}, "
                    f"fidelity {row.pacing_fidelity:.1%}",
                    file=sys.stderr,
                )
    result = _result(rows, failed)
    if output:
        write_text(output, json_.dumps(result, indent=1) + "\n")
        _draw(rows, output.with_suffix(".png"))
    if json:
        print(json_.dumps(result, indent=1))
        return
    for line in result["rows"]:
        print(f"{line['name']}: {line['ours']:.2f} {line['unit']} (bar {line['bar']})")
    for sentence in failed:
        print(f"not used: {sentence}")


def _write_cluster(folder: Path, index: int, generator: random.Random) -> Path:
    """2 to 8 chips of 1 to 4 types, each type with a chip file of its own."""
    folder.mkdir()
    text = f'name = "made-up-{index}"\n'
    left = generator.randint(2, 8)
    for name in generator.sample(["a-mini", "b-mini", "c-mini", "d-mini"], 4):
        if left == 0:
            break
        size = left if left <= 2 else generator.choice([1, 2, 2, 4])
        size = min(size, left)
        left -= size
        _write_chip(folder / f"{name}-slow.toml", load_chip(name), generator)
        text += f'[[nodes]]\nchip = "{name}-slow.toml"\nchips = {size}\n'
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def _write_chip(path: Path, twin: ChipSpec, generator: random.Random) -> None:
    """The twin's file with other figures: slow, so that the host keeps up with eight of them."""
    changes = {
        "launch_s": 10 ** generator.uniform(-3.7, -3.4),
        "float32_flops": 10 ** generator.uniform(8.7, 9.4),
        "capacity_bytes": round(2**20 * generator.choice([12, 16, 24, 48])),
        "bandwidth_bytes_per_s": 10 ** generator.uniform(8.3, 9.0),
        "intra_node_bytes_per_s": 10 ** generator.uniform(6.6, 7.8),
        "intra_node_latency_s": 10 ** generator.uniform(-4, -3),
        "nic_bytes_per_s": 10 ** generator.uniform(6.3, 7.6),
        "nic_latency_s": 10 ** generator.uniform(-4, -2.7),
    }
    lines = twin.path.read_text().splitlines()
    for at, line in enumerate(lines):
        key = line.split("=")[0].strip()
        if key in changes:
            value = changes.pop(key)
            lines[at] = f"{key} = {value!r}"
    assert not changes, changes
    path.write_text("\n".join(lines) + "\n")


def _plans(cluster: Cluster, model: ModelSpec, wanted: int, generator: random.Random) -> list[Plan]:
    """The best plans of unlike requests, and some of their runners-up, that fit."""
    found: list[Plan] = []
    for sequences in (1, 2):
        for zero_stage in (0, 1):
            request = Request(
                cluster=cluster,
                model=model,
                global_batch=GLOBAL_BATCH,
                sequences=sequences,
                zero_stage=zero_stage,
            )
            for name in ASKED:
                try:
                    result = planner(name)(request)
                except SearchError:
                    continue
                found += [candidate.plan for candidate in (result.best, *result.runners_up)]
    unlike = list({_outline(plan): plan for plan in found}.values())
    return generator.sample(unlike, min(wanted, len(unlike)))


def _run(plan: Plan, cluster: Cluster, cluster_folder: Path, folder: Path, steps: int) -> Row:
    """Trains a plan. Raises TrainingError when it fails, or no step was paced well enough."""
    training = start(plan, cluster_folder / "cluster.toml", folder, steps)
    metrics = training.steps()
    paced = well_paced(metrics)
    peaks = zip(*(step["peak_memory_bytes"] for step in metrics), strict=True)
    return Row(
        cluster=cluster.name,
        model=plan.model.name,
        plan=_outline(plan),
        ranks=plan.world_size,
        predicted_step_s=simulate(plan, cluster).step_s,
        measured_step_s=statistics.median(step["step_s"] for step in paced),
        pacing_fidelity=min(step["pacing_fidelity"] for step in paced),
        predicted_memory_bytes=tuple(memory.total for memory in rank_memory(plan, cluster)),
        measured_memory_bytes=tuple(max(of_rank) for of_rank in peaks),
    )


def _outline(plan: Plan) -> str:
    stages = plan.pipelines[0].stages
    parts = (
        f"{stage.replicas[0].chip.removesuffix('-slow.toml')} {stage.layer_count} layers "
        f"dp{stage.dp} tp{stage.tp}{' R' if stage.recompute else ''}"
        for stage in stages
    )
    zero = f"zero {plan.zero_stage}, " if any(stage.dp > 1 for stage in stages) else ""
    return f"{zero}micro-batch {plan.micro_batch}: " + ", ".join(parts)


def _result(rows: list[Row], failed: list[str]) -> dict:
    own = [row for row in rows if row.model not in FAMILIES]
    lines = []
    for name, errors in _errors(own).items() if own else ():
        for kind, bar in zip(("median", "worst"), BARS[name], strict=True):
            of = statistics.median if kind == "median" else max
            lines.append(_line(f"{kind} error of {name}", "%", of(errors), bar, "lower"))
    for family in dict.fromkeys(row.model for row in rows if row.model in FAMILIES):
        for name, errors in _errors([row for row in rows if row.model == family]).items():
            bar = FAMILY_BARS[name]
            lines.append(_line(f"{family}: worst error of {name}", "%", max(errors), bar, "lower"))
    lines.append(_line("plans", "plans", len(own), 20, "higher"))
    lines.append(_line("clusters", "clusters", len({row.cluster for row in own}), 5, "higher"))
    return {
        "tool": "accuracy",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "rows": lines,
        "plans": [
            {**asdict(row), "step_error": row.step_error, "memory_error": row.memory_error}
            for row in rows
        ],
        "not used": failed,
    }


def _errors(rows: list[Row]) -> dict[str, list[float]]:
    """Returns the sizes of the errors, in percent."""
    return {
        "step time": [100 * abs(row.step_error) for row in rows],
        "peak memory": [100 * abs(row.memory_error) for row in rows],
    }


def _line(name: str, unit: str, ours: float, bar: float, better: str) -> dict:
    empty = {"peer": None, "peer_name": None, "ratio": None}
    return {"name": name, "unit": unit, "ours": ours, **empty, "bar": bar, "better": better}


def _draw(rows: list[Row], path: Path) -> None:
    """Predicted over measured, of step time and of every rank's peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    from heteropp.description.timeline import drawing, save

    figure, (left, right) = drawing().subplots(1, 2, figsize=(10, 4.6))
    for cluster in sorted({row.cluster for row in rows}):
        own = [row for row in rows if row.cluster == cluster]
        label = f"{cluster}, {own[0].ranks} chips"
        steps = [(row.measured_step_s, row.predicted_step_s) for row in own]
        left.plot(*zip(*steps, strict=True), "o", alpha=0.7, label=label)
        peaks = [
            (measured / 2**20, predicted / 2**20)
            for row in own
            for measured, predicted in zip(
                row.measured_memory_bytes, row.predicted_memory_bytes, strict=True
            )
        ]
        right.plot(*zip(*peaks, strict=True), "o", alpha=0.7, label=label)
    for axes, what, unit in ((left, "step", "s"), (right, "peak memory", "MiB")):
        ends = [f(axes.get_xlim()[i], axes.get_ylim()[i]) for i, f in ((0, min), (1, max))]
        axes.plot(ends, ends, color="grey", linewidth=0.8)
        axes.set(xlabel=f"measured {what} ({unit})", ylabel=f"predicted {what} ({unit})")
        axes.grid(alpha=0.3)
    if rows:
        left.legend(fontsize=7)
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    app()
