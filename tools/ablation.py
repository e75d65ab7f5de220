"""H2's ablation (Table 9, figure 11), sequences and experts that lie over unlike chips, and slices.

Trains small models on small clusters of slow emulated chips that keep the ratios of the paper's,
and holds what comes out against what the paper published; on two chips of speeds 1 and 2, it holds
sequences that are cut by speed against those cut in half; on four nodes that are far from each
other, sequences in slices against the best plan without. All configurations of a part stay in
memory and take a step each in turn. A step whose pacing fidelity is below 99% is not used; figures
are medians over the rounds of ratios within a round, and a row that another run might turn is not
judged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated

import sliced_sequences
import spread_experts
import typer
from evidence import Row, row, show
from paper_tables.h2 import MEDIATED, equal_layers
from pipelines.ranks import Failed, Ranks
from pipelines.training import TrainedStep, TrainingRank
from pipelines.turns import take_turns
from twins import Scale, write_speeds, write_twin

from dicomm.bench.judging import is_judged, row_over_rounds
from dicomm.bench.quiet import Quiet, worst
from heteropp.cost.token_shares import token_shares
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask
from heteropp.search.planner import Request
from heteropp.simulator.simulate import simulate
from hyperhetero.cli import CommandLine

LEAST_FIDELITY = 0.99  # of pacing; a step below is not used

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
C_SCALE = Scale(computing=2e5, memory=1e3, memory_bandwidth=1e3, links=1290, nics=3400)

# Exp-A and Exp-B: a chip stands for a tensor-parallel group, which this model cannot be cut for
CHIPS_OF_A_VENDOR = 4
ALONE, ALONE_BATCH = "abcd", 16
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

# two chips in one replica, each with its own tokens of every sequence
CP_SPEEDS = (1.0, 2.0)
CP_MICRO_BATCHES = 2
CP_MODEL = LlamaModel(
    name="cut-over-chips",
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=4,
    intermediate=768,
    vocab=256,
    sequence_length=512,
    attention="fused",
)
CP_SCALE = Scale(computing=1e5, memory=1e2, memory_bandwidth=1e3, links=1290, nics=340)
EP_SCALE = Scale(computing=1e5, memory=1e2, memory_bandwidth=1e3, links=1290, nics=340)

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
    "parts of sequences: twins of chip A, of which the second computes and reads memory twice as "
    "fast, in one replica of context-parallel degree 2",
    "slices: four nodes of a twin of chip A, a sequence of 1,024 tokens for all of them",
    "numbers of experts: the same two chips, as replicas with one and two sequences of a "
    "micro-batch, between which six experts of a layer lie, to all of which each token goes",
]


# seconds of each configuration's steps, one a round; None where the host did not keep up
Steps = Mapping[str, Sequence[float | None]]


class Paced:
    """Steps taken so far, of all configurations: how many, and how well they were paced."""

    def __init__(self) -> None:
        self.fidelities: list[float] = []
        self.quiets: list[Quiet] = []

    def take(self, what: str, ranks_of: Mapping[str, Ranks], rounds: int) -> Steps:
        """Takes a step of each configuration in every round. Raises Failed."""
        taken, quiet = take_turns(what, {(name,): ranks_of[name] for name in ranks_of}, rounds)
        self.quiets.append(quiet)
        return {name: [self._step_s(step) for step in steps] for (name,), steps in taken.items()}

    def _step_s(self, of_ranks: Sequence[TrainedStep]) -> float | None:
        self.fidelities.append(min(step.fidelity for step in of_ranks))
        paced = self.fidelities[-1] >= LEAST_FIDELITY
        return max(step.step_s for step in of_ranks) if paced else None

    def rows(self) -> list[Row]:
        used = [each for each in self.fidelities if each >= LEAST_FIDELITY]
        share = len(used) / len(self.fidelities)
        least = 100 * min(used) if used else None
        return [
            row("steps that are used", "%", 100 * share, better="higher"),
            row("pacing fidelity of those, least", "%", least, bar=99, better="higher"),
        ]


app = CommandLine()


@app.command()
def main(
    rounds: Annotated[
        int, typer.Option(min=1, help="Steps of each configuration; one more warms up.")
    ] = 12,
    slower: Annotated[
        float, typer.Option(min=1, help="Times as slow chips and links, for a busy host.")
    ] = 1.0,
    table9: Annotated[bool, typer.Option("--table-9/--no-table-9", help="Measure Table 9.")] = True,
    ratios: Annotated[bool, typer.Option(help="Measure HeteroSpeedupRatios.")] = True,
    parts: Annotated[bool, typer.Option(help="Measure sequences cut over unlike chips.")] = True,
    experts: Annotated[
        bool, typer.Option(help="Measure experts that lie over unlike chips.")
    ] = True,
    slices: Annotated[bool, typer.Option(help="Measure sequences that run in slices.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    """Table 9 and HeteroSpeedupRatios of H2, sequences and experts over unlike chips, and
    sequences in slices, measured on emulated twins in about 20 minutes."""
    rows: list[Row] = []
    paced = Paced()
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
        try:
            wanted = (
                *((table_9, table9), (speedup_ratios, ratios)),
                *((parts_of_sequences, parts), (numbers_of_experts, experts)),
                (sequences_in_slices, slices),
            )
            for measure, is_wanted in wanted:
                rows += measure(Path(folder), paced, rounds, slower) if is_wanted else []
        except Failed as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
    rows += paced.rows() if rows else []
    show("ablation", rows, ASSUMPTIONS, json, worst(paced.quiets))


def table_9(folder: Path, paced: Paced, rounds: int, slower: float) -> list[Row]:
    """Step times of the full system and of four without something. Raises Failed."""
    scale = C_SCALE.slower(slower)
    fast = write_twin(folder / "exp-c", C_CHIPS, scale)
    slow = write_twin(folder / "exp-c-tcp", C_CHIPS, scale, MEDIATED)
    full = fastest_plan(read_cluster(fast))
    plans = {
        "full": full,
        "without overlap": replace(full, overlap=False),
        "without SR&AG": replace(full, resharding="direct"),
        "uniform 1F1B": equal_layers(full),
    }
    join = partial(TrainingRank, plans, fast, None)
    over_tcp = partial(TrainingRank, {"CPU-mediated TCP": full}, slow, "cpu-mediated")
    with Ranks(full.world_size, join) as direct, Ranks(full.world_size, over_tcp) as mediated:
        ranks_of = {name: direct if name in plans else mediated for name in PUBLISHED}
        return table_9_rows(paced.take("Table 9", ranks_of, rounds))


def table_9_rows(step_s: Steps) -> list[Row]:
    """Percents of the full system's step time, and whether they are in the paper's order."""
    bars = {"uniform 1F1B": 115.0}
    rows = [
        row_over_rounds(f"Table 9, {name}", "%", percents(step_s, name, "full"), peer=published,
            peer_name="published", bar=bars.get(name),
            better="higher" if name in bars else "lower")
        for name, published in PUBLISHED.items()
    ]  # fmt: skip
    pairs = [
        row_over_rounds(f"Table 9, {slower} against {faster}", "%",
            percents(step_s, slower, faster), peer=100 * PUBLISHED[slower] / PUBLISHED[faster],
            peer_name="published", bar=100.0, better="higher")
        for faster, slower in pairwise(PUBLISHED)
    ]  # fmt: skip
    judged = [pair for pair in pairs if is_judged(pair)]
    in_order = sum(pair["ours"] > 100 for pair in judged)
    count = row(
        "Table 9, neighbours in the paper's order", "pairs", in_order, bar=len(pairs),
        better="higher",
    )  # fmt: skip
    if in_order == len(judged) < len(pairs):
        count["not_judged"] = f"of {len(pairs)} pairs, {len(judged)} are judged"
    return [*rows, *pairs, count]


def percents(step_s: Steps, name: str, base: str) -> list[float]:
    """Step times in percent of those of another configuration in the same round."""
    both = zip(step_s[name], step_s[base], strict=True)
    return [100 * one / other for one, other in both if one is not None and other is not None]


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
    return _of_stages(C_MODEL, C_MICRO_BATCHES, stages)


def _of_stages(model: LlamaModel, micro_batches: int, stages: tuple[Stage, ...]) -> Plan:
    return Plan(
        model=model,
        global_batch=micro_batches,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=0,
        pipelines=(Pipeline(micro_batches=micro_batches, stages=stages),),
    )


def speedup_ratios(folder: Path, paced: Paced, rounds: int, slower: float) -> list[Row]:
    """Tokens per second together, to the sum of each vendor's alone. Raises Failed."""
    batches = {name: (name, ALONE_BATCH) for name in ALONE}
    batches |= {name: (vendors, batch) for name, (vendors, batch, _) in EXPERIMENTS.items()}
    with ExitStack() as stack:
        ranks_of = {}
        for name, (vendors, batch) in batches.items():
            plan, cluster = _planned(folder / name, vendors, batch, AB_SCALE.slower(slower))
            join = partial(TrainingRank, {name: plan}, cluster, None)
            ranks_of[name] = stack.enter_context(Ranks(plan.world_size, join))
        return speedup_rows(paced.take("HeteroSpeedupRatios", ranks_of, rounds))


def speedup_rows(step_s: Steps) -> list[Row]:
    rows = []
    for name, (vendors, batch, published) in EXPERIMENTS.items():
        samples = []
        for together_s, *alone_s in zip(step_s[name], *(step_s[v] for v in vendors), strict=True):
            known_s = [each_s for each_s in alone_s if each_s is not None]
            if together_s is not None and len(known_s) == len(vendors):
                alone_per_s = sum(ALONE_BATCH / each_s for each_s in known_s)
                samples.append(100 * batch / together_s / alone_per_s)
        bar = 100.0 if name == "Exp-A-2" else None
        rows.append(
            row_over_rounds(f"HeteroSpeedupRatio, twin of {name}", "%", samples, peer=published,
                peer_name="published", bar=bar, better="higher")
        )  # fmt: skip
    return rows


def _planned(folder: Path, vendors: str, batch: int, scale: Scale) -> tuple[Plan, Path]:
    """heteroauto's plan for as many chips of each vendor, and their cluster's file."""
    path = write_twin(folder, {name: [CHIPS_OF_A_VENDOR] for name in vendors}, scale)
    request = Request(cluster=read_cluster(path), model=AB_MODEL, global_batch=batch)
    return ask("heteroauto", request, 1).best.plan, path


def parts_of_sequences(folder: Path, paced: Paced, rounds: int, slower: float) -> list[Row]:
    """Sequences cut by the speeds of a replica's chips, against equal parts. Raises Failed."""
    path = write_speeds(folder / "parts", CP_SPEEDS, CP_SCALE.slower(slower))
    cluster, half = read_cluster(path), CP_MODEL.sequence_length // 2
    shares = {"equal parts": (half, half), "parts by speed": token_shares(CP_MODEL, CP_SPEEDS)}
    plans = {name: _cut_plan(cluster, each) for name, each in shares.items()}
    return parts_rows(*_in_turn("parts of sequences", path, plans, paced, rounds))


def numbers_of_experts(folder: Path, paced: Paced, rounds: int, slower: float) -> list[Row]:
    """Experts that lie over two chips by their speeds, against equal numbers. Raises Failed."""
    path = write_speeds(folder / "experts", spread_experts.SPEEDS, EP_SCALE.slower(slower))
    plans = spread_experts.plans(read_cluster(path))
    measured = _in_turn("numbers of experts", path, plans, paced, rounds)
    what = "experts by speed, tokens/s to those of equal numbers"
    return gain_rows(what, 1.2, spread_experts.EQUAL, spread_experts.BY_SPEED, *measured)


def sequences_in_slices(folder: Path, paced: Paced, rounds: int, slower: float) -> list[Row]:
    """Slices where links are slow, against the best plan without. Raises Failed."""
    path = sliced_sequences.write_cluster(folder / "slices", slower)
    measured = _in_turn("slices", path, sliced_sequences.plans(path), paced, rounds)
    what = "slices, tokens/s to those of the best plan without"
    return gain_rows(what, 1.2, sliced_sequences.WITHOUT, sliced_sequences.SLICED, *measured)


def _in_turn(
    what: str, path: Path, plans: Mapping[str, Plan], paced: Paced, rounds: int
) -> tuple[Steps, dict[str, float]]:
    """Returns the steps of plans that stay in memory together, and what is simulated of each.

    path: of their cluster's file. Raises Failed.
    """
    cluster = read_cluster(path)
    with Ranks(cluster.world_size, partial(TrainingRank, plans, path, None)) as ranks:
        step_s = paced.take(what, dict.fromkeys(plans, ranks), rounds)
    return step_s, {n: simulate(plan, cluster, emulated=True).step_s for n, plan in plans.items()}


def parts_rows(step_s: Steps, simulated_s: Mapping[str, float]) -> list[Row]:
    what = "parts by speed, tokens/s to those of equal parts"
    return gain_rows(what, 1.25, "equal parts", "parts by speed", step_s, simulated_s)


def gain_rows(
    what: str, bar: float, base: str, other: str, step_s: Steps, simulated_s: Mapping[str, float]
) -> list[Row]:
    """How many times as many tokens per second, and what simulated steps are off the measured."""
    gains = [percent / 100 for percent in percents(step_s, base, other)]
    rows = [row_over_rounds(what, "x", gains, bar=bar, better="higher")]
    for name, expected_s in simulated_s.items():
        errors = [100 * abs(expected_s / each_s - 1) for each_s in step_s[name] if each_s]
        rows.append(row_over_rounds(f"{name}, simulated step off", "%", errors, bar=2.0))
    return rows


def _cut_plan(cluster: Cluster, shares: tuple[int, ...]) -> Plan:
    chips = tuple(node.chip_name for node in cluster.nodes)
    replica = Replica(
        ranks=tuple(range(cluster.world_size)), chip=chips[0], batch_share=1,
        token_shares=shares, group_chips=chips,
    )  # fmt: skip
    stage = Stage(layers=(0, CP_MODEL.layers), recompute=False, replicas=(replica,))
    return _of_stages(CP_MODEL, CP_MICRO_BATCHES, (stage,))


if __name__ == "__main__":
    app()
