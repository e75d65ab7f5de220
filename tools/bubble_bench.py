"""The bubble of every schedule on paced stages, beside what the simulator says of it.

Emulated chips on which F, I and W of a stage take equally long run four stages of 16 micro-batches.
The bubble is the time of a step in which a chip computes nothing, on average over the chips; the
links take next to none of it. 1F1B sends the gradient of an input before it computes those of the
weights; classic 1F1B's bubble is (P - 1) / (m + P - 1). What a boundary tensor of 8 MiB costs is
measured on stages that sleep on the host: beside the same step with a boundary of next to nothing,
for our executor and for torch.distributed.pipelining.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from evidence import Row, row
from pipelines.paced import CHIP, CLUSTER, SEQUENCES, PacedRank, Ran, even_model, write_cluster
from pipelines.ranks import Ranks, chosen
from pipelines.turns import report, take_turns

from dicomm.bench.quiet import Quiet
from heteropp.description.plan import Schedule
from heteropp.schedule.action import Action, Kind
from hyperhetero.cli import CommandLine

STAGES, MICRO_BATCHES, LAYERS = 4, 16, 8
COMPUTING = {Kind.F, Kind.R, Kind.B, Kind.I, Kind.W}
# name: schedule, ministages, slack
SCHEDULES: dict[str, tuple[Schedule, int, int]] = {
    "gpipe": ("gpipe", 1, 0),
    "gpipe, 2 ministages": ("gpipe", 2, 0),
    "1f1b": ("1f1b", 1, 0),
    "1f1b, slack 1": ("1f1b", 1, 1),
    "interleaved-1f1b": ("interleaved-1f1b", 2, 0),
    "zb-h1": ("zb-h1", 1, 0),
    "zb-v": ("zb-v", 2, 0),
    "chimera": ("chimera", 2, 0),
}
SMALL_BYTES, LARGE_BYTES = 16 << 10, 8 << 20  # of boundary tensors
CLASSIC = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)

app = CommandLine()


def bubble(ran: list[list[tuple[Action, float, float]]], step_s: float) -> float:
    """Returns the fraction of the step in which a chip computes nothing, on average over the chips.

    ran: for each chip its actions with their begin and end in seconds.
    """
    busy_s = [
        sum(end - begin for action, begin, end in one if action.kind in COMPUTING) for one in ran
    ]
    return 1 - statistics.mean(busy_s) / step_s


def measured(steps: list[list[Ran]]) -> float:
    """The median bubble of several steps of all ranks."""
    found = []
    for ranks in steps:
        begin_s = min(ran.actions[0][1] for ran in ranks)
        end_s = max(ran.actions[-1][2] for ran in ranks)
        found.append(bubble([ran.actions for ran in ranks], end_s - begin_s))
    return statistics.median(found)


def paced_rows(action_s: float, steps: int) -> tuple[list[Row], Quiet]:
    """Returns the rows that compare each schedule's measured bubble with the simulated one."""
    from pipelines.stages import even_plan

    from heteropp.description.cluster import read_cluster
    from heteropp.simulator.simulate import simulate

    model = even_model(LAYERS)
    plans = {
        name: even_plan(
            model, schedule, STAGES, MICRO_BATCHES, SEQUENCES, ministages, slack, chip=CHIP
        )
        for name, (schedule, ministages, slack) in SCHEDULES.items()
    }
    rows, fidelity = [], 1.0
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_cluster(folder, model, STAGES, action_s)
        cluster = read_cluster(folder / CLUSTER)
        join = partial(PacedRank, folder, plans)
        with Ranks(STAGES, join) as ranks:
            cases = {(name,): ranks for name in plans}
            ran, quiet = take_turns("schedules", cases, steps)
        for name, plan in plans.items():
            simulation = simulate(plan, cluster, emulated=True)
            timing = simulation.timing
            by_rank = [
                list(zip(*of_rank, strict=True))
                for of_rank in zip(
                    simulation.program.tables, timing.starts, timing.ends, strict=True
                )
            ]
            predicted, found = bubble(by_rank, simulation.step_s), measured(ran[name,])
            rows += schedule_rows(name, 100 * found, 100 * predicted)
            fidelity = min(fidelity, *(one.fidelity for ranks in ran[name,] for one in ranks))
    early_dx = min(measured(ran[name,]) for name in SCHEDULES if name.startswith("1f1b"))
    rows.append(row("1f1b: bubble, best against classic", "x", early_dx / CLASSIC, bar=2 / 3))
    rows.append(row("pacing fidelity, the least of all", "%", 100 * fidelity, better="higher"))
    return rows, quiet


def schedule_rows(name: str, found: float, predicted: float) -> list[Row]:
    """Returns one schedule's rows; `found` (measured) and `predicted` are bubbles in percent."""
    rows = [
        row(f"{name}: bubble", "%", found, peer=predicted, peer_name="simulator",
            bar=4.0 if name == "zb-v" else None),
        row(f"{name}: bubble, off the simulator's", "points", abs(found - predicted), bar=1.0),
    ]  # fmt: skip
    return rows


def boundary_rows(backend: str, action_s: float, steps: int) -> tuple[list[Row], Quiet]:
    """What large boundary tensors add to a step of 1F1B."""
    from pipelines.sleeping import SleepingRank

    from heteropp.runtime.step.whole import STEPS

    cases = list(product(("ours", "torch"), (SMALL_BYTES, LARGE_BYTES)))
    sizes = (SMALL_BYTES, LARGE_BYTES)
    join = partial(SleepingRank, STAGES, MICRO_BATCHES, sizes, action_s, backend)
    # on the host our executor first learns which stages wait: see heteropp/runtime/step/whole.py
    with Ranks(STAGES, join) as ranks:
        turns = dict.fromkeys(cases, ranks)
        ran, quiet = take_turns(f"boundary over {backend}", turns, steps, untimed=STEPS)
    step_s = {case: statistics.median(map(max, ran[case])) for case in cases}
    cost = {
        who: 100 * (step_s[who, LARGE_BYTES] / step_s[who, SMALL_BYTES] - 1)
        for who in ("ours", "torch")
    }
    name = f"1f1b: cost of a boundary of {LARGE_BYTES >> 20} MiB over {backend}"
    return [
        row(name, "%", cost["ours"], peer=cost["torch"], peer_name="torch 1F1B", bar=5.0)
    ], quiet


@app.command(
    help=__doc__,
    epilog="Examples:  tools/bubble-bench  |  tools/bubble-bench --action-ms 100 --json",
)
def main(
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of each configuration; medians count.")
    ] = 3,
    action_ms: Annotated[
        float, typer.Option(min=0.1, help="How long F of a stage takes, and I, and W.")
    ] = 50.0,
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend for the large boundary: gloo or dicomm, repeatable; both if absent."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    report("bubble-bench", __doc__, parts(action_ms * 1e-3, steps, transport), json)


def parts(
    action_s: float, steps: int, transport: list[str] | None
) -> Iterator[tuple[list[Row], Quiet]]:
    """Raises BadInput or Failed."""
    backends = chosen(transport)
    yield paced_rows(action_s, steps)
    for backend in backends:
        yield boundary_rows(backend, action_s, steps)


if __name__ == "__main__":
    app()
