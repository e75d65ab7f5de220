"""H2's ablation (Table 9) and HeteroSpeedupRatio (figure 11), measured on emulated twins.

Trains small models on small clusters of slow emulated chips that keep the ratios of the paper's,
and holds what comes out against what the paper published. A step whose pacing fidelity is below
95% is not used.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated

import typer
from evidence import Row, row, show
from paper_tables.h2 import MEDIATED, equal_layers
from trained import Training, TrainingError, start, well_paced
from twins import Scale, write_twin

from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask
from heteropp.search.planner import Request
from heteropp.simulator.simulate import simulate

# Table 9, in percent of the full system's step time, in the order of the times
PUBLISHED = {
    "full": 100.0,
    "without overlap": 101.8,
    "without SR&AG": 104.8,
    "CPU-mediated TCP": 110.1,
    "uniform 1F1B": 126.4,
}
# Exp-C-1's cluster: a stage of A and two of B, each of one tensor-parallel group
C_CHIPS = {"a": [4], "b": [4, 4]}
C_MICRO_BATCHES = 8
C_MODEL = LlamaModel(
    name="exp-c-twin",
    layers=16,
    hidden=128,
    heads=4,
    kv_heads=4,
    intermediate=384,
    vocab=256,
    sequence_length=128,
)
C_SCALE = Scale(computing=1e5, memory=1e3, memory_bandwidth=5e2, links=645, nics=1700)

# Exp-A and Exp-B: a chip stands for a tensor-parallel group, which this model cannot be cut for
CHIPS_OF_A_VENDOR = 4
ALONE_BATCH = 16
# vendors, sequences a step, and the published ratio in percent
EXPERIMENTS = {
    "Exp-A-1": ("abc", ALONE_BATCH, 89.56),
    "Exp-A-2": ("abc", 3 * ALONE_BATCH, 109.03),
    "Exp-B-1": ("abcd", ALONE_BATCH, 77.45),
    "Exp-B-2": ("abcd", 4 * ALONE_BATCH, 104.29),
}
AB_MODEL = LlamaModel(
    name="exp-a-b-twin",
    layers=24,
    hidden=64,
    heads=4,
    kv_heads=1,
    intermediate=192,
    vocab=256,
    sequence_length=256,
)
AB_SCALE = Scale(computing=2e4, memory=1.2e3, memory_bandwidth=4e3, links=400, nics=133)

ASSUMPTIONS = [
    "the chips are those of tools/paper-tables (chip files a to d), each kind of figure divided by "
    "one number for all four of them; tools/ablation.py has the numbers",
    "Table 9: 4 chips A and 8 B for 384 and 1024; three stages of tensor-parallel degree 4, with "
    "the layers that are simulated to be fastest; NICs so slow that a TCP row of 106% is simulated",
    "without overlap: a send holds its chip until it arrived; without SR&AG: every receiving rank "
    f"is sent the whole tensor; TCP: tensors go through host memory and take {MEDIATED} times as "
    "long (figure 7's mean); uniform 1F1B: as many layers on every stage",
    "ratios: 4 chips of a vendor for 256, each standing for a tensor-parallel group, with 16 "
    "sequences a step alone; heteroauto plans each vendor alone and all together, in memory so "
    "scaled that B, C and D alone recompute and A does not (Table 6 has D offload)",
]


class Runs:
    """Trainings in a folder, and how well they were paced."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.fidelity = 1.0  # the least
        self.started: list[Training] = []

    def start(self, name: str, plan: Plan, cluster: Path, *options: str) -> Training:
        self.started.append(start(plan, cluster, self.folder / name, self.steps, *options))
        return self.started[-1]

    def stop(self) -> None:
        """Ends what still runs."""
        for training in self.started:
            training.stop()

    def step_s(self, name: str, training: Training) -> float:
        """The median step. Raises TrainingError."""
        try:
            paced = well_paced(training.steps())
        except TrainingError as error:
            raise TrainingError(f"{name}: {error}") from None
        fidelity = min(step["pacing_fidelity"] for step in paced)
        self.fidelity = min(self.fidelity, fidelity)
        step_s = statistics.median(step["step_s"] for step in paced)
        print(f"{name}: step {step_s:.3f} s, pacing fidelity {fidelity:.1%}", file=sys.stderr)
        return step_s


def main(
    steps: Annotated[int, typer.Option(min=2, help="Of each training; the first warms up.")] = 3,
    table9: Annotated[bool, typer.Option("--table-9/--no-table-9", help="Measure Table 9.")] = True,
    ratios: Annotated[bool, typer.Option(help="Measure HeteroSpeedupRatios.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    """Table 9 and HeteroSpeedupRatios of H2, measured on emulated twins in about five minutes."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
        runs = Runs(Path(folder), steps)
        try:
            rows += table_9(runs) if table9 else []
            rows += speedup_ratios(runs) if ratios else []
        except TrainingError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
        finally:
            runs.stop()
    rows.append(row("pacing fidelity, least", "%", 100 * runs.fidelity, bar=95, better="higher"))
    show("ablation", rows, ASSUMPTIONS, json)


def table_9(runs: Runs) -> list[Row]:
    """Step times of the full system and of four without something. Raises TrainingError."""
    fast = write_twin(runs.folder / "exp-c", C_CHIPS, C_SCALE)
    slow = write_twin(runs.folder / "exp-c-tcp", C_CHIPS, C_SCALE, MEDIATED)
    full = fastest_plan(read_cluster(fast))
    variants: Mapping[str, tuple[Plan, Path, tuple[str, ...]]] = {
        "full": (full, fast, ()),
        "without overlap": (replace(full, overlap=False), fast, ()),
        "without SR&AG": (replace(full, resharding="direct"), fast, ()),
        "CPU-mediated TCP": (full, slow, ("--p2p", "cpu-mediated")),
        "uniform 1F1B": (equal_layers(full), fast, ()),
    }
    measured_s = {
        name: runs.step_s(name, runs.start(name, plan, cluster, *options))
        for name, (plan, cluster, options) in variants.items()
    }
    percent = {name: 100 * step_s / measured_s["full"] for name, step_s in measured_s.items()}
    bars = {"uniform 1F1B": 115.0}
    rows = [
        row(f"Table 9, {name}", "%", percent[name], peer=published, peer_name="published",
            bar=bars.get(name), better="higher" if name in bars else "lower")
        for name, published in PUBLISHED.items()
    ]  # fmt: skip
    in_order = sum(percent[one] < percent[other] for one, other in pairwise(PUBLISHED))
    rows.append(
        row("Table 9, neighbours in the paper's order", "pairs", in_order, bar=4, better="higher")
    )
    return rows


def fastest_plan(cluster: Cluster) -> Plan:
    """One stage a node, with the layers that make the step fastest, as simulated."""
    count = len(cluster.nodes)
    every = (
        _plan(cluster, (0, *cuts, C_MODEL.layers))
        for cuts in combinations(range(1, C_MODEL.layers), count - 1)
    )
    return min(every, key=lambda plan: simulate(plan, cluster, emulated=True).step_s)


def _plan(cluster: Cluster, cuts: Sequence[int]) -> Plan:
    stages = tuple(
        Stage(
            layers=layers,
            recompute=False,
            replicas=(Replica(ranks=tuple(node.ranks), chip=node.chip_name, batch_share=1),),
        )
        for node, layers in zip(cluster.nodes, pairwise(cuts), strict=True)
    )
    return Plan(
        model=C_MODEL,
        global_batch=C_MICRO_BATCHES,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=0,
        pipelines=(Pipeline(micro_batches=C_MICRO_BATCHES, stages=stages),),
    )


def speedup_ratios(runs: Runs) -> list[Row]:
    """Tokens per second together, to the sum of each vendor's alone. Raises TrainingError."""
    alone = {name: _planned(runs, name, ALONE_BATCH) for name in "abcd"}
    # at once: none of them keeps this machine's cores busy
    started = {name: runs.start(f"{name} alone", *what) for name, what in alone.items()}
    per_s = {
        name: ALONE_BATCH / runs.step_s(f"{name} alone", training)
        for name, training in started.items()
    }
    rows = []
    for experiment, (vendors, batch, published) in EXPERIMENTS.items():
        training = runs.start(experiment, *_planned(runs, vendors, batch))
        together = batch / runs.step_s(experiment, training)
        ratio = 100 * together / sum(per_s[name] for name in vendors)
        bar = 100 if experiment == "Exp-A-2" else None
        rows.append(
            row(f"HeteroSpeedupRatio, twin of {experiment}", "%", ratio, peer=published,
                peer_name="published", bar=bar, better="higher")
        )  # fmt: skip
    return rows


def _planned(runs: Runs, vendors: str, batch: int) -> tuple[Plan, Path]:
    """heteroauto's plan for as many chips of each vendor, and their cluster's file."""
    chips = {name: [CHIPS_OF_A_VENDOR] for name in vendors}
    path = write_twin(runs.folder / f"chips-{vendors}-{batch}", chips, AB_SCALE)
    request = Request(cluster=read_cluster(path), model=AB_MODEL, global_batch=batch)
    return ask("heteroauto", request, 1).best.plan, path


if __name__ == "__main__":
    typer.run(main)
