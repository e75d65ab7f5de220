"""heteropp-simulate: runs a plan on predicted times, without chips, and shows when what happens."""

from __future__ import annotations

import json as json_
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from heteropp.api.console import output_console
from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from heteropp.cli.show import ranges
from heteropp.cli.trust import TrustRemoteCode
from heteropp.description.outline import together
from heteropp.search.planner import MOST_SEQUENCES
from hyperhetero.cli import CommandLine, output_file

if TYPE_CHECKING:
    from heteropp.simulator.simulate import Simulation

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-simulate --plan plan.json --cluster cluster.toml
  heteropp-simulate --plan plan.json --cluster cluster.toml --picture plan.png
  heteropp-simulate --plan plan.json --cluster cluster.toml \\
    --straggler 3:1.5 --noise 0.05 --seed 7
  heteropp-simulate --plan plan.json --cluster cluster.toml --slack 1
  heteropp-simulate --plan plan.json --cluster cluster.toml --profile profile.json
"""
STUCK = 1


@app.command(help=__doc__, epilog=EXAMPLES)
def simulate(
    plan: Annotated[Path, typer.Option(help="What heteropp-search wrote.")],
    cluster: Annotated[Path, typer.Option(help="The cluster file of the plan.")],
    profile: Annotated[
        Path | None,
        typer.Option(help="Times that heteropp-profile measured, in place of the chip files'."),
    ] = None,
    trace: Annotated[Path | None, output_file(help="Write a Chrome trace here.")] = None,
    picture: Annotated[
        Path | None, output_file(help="Draw timeline, shares and memory here (PNG).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    noise: Annotated[
        float, typer.Option(min=0, max=2, help="Sigma of a random factor on each piece of work.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of --noise and of --straggler any:FACTOR.")] = 0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK:FACTOR", help="A rank whose work takes FACTOR times as long; repeatable."
        ),
    ] = None,
    slack: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_SEQUENCES,
            help="Plays a transport that posts no receives ahead, of which so many sends may wait"
            " for their receive; 0: nothing is buffered.",
        ),
    ] = None,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Messages as emulated chips pace them.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    with one_sentence():
        from heteropp.api.given import unused_profile
        from heteropp.api.simulation import simulate as run
        from heteropp.description.plan import read_plan
        from heteropp.simulator.picture import draw_simulation
        from heteropp.simulator.simulate import DeadlockError

        content = read_plan(plan)
        if said := unused_profile(content, profile):
            print(said, file=sys.stderr)
        slowdown = _slowdown(straggler or [], content.world_size, seed)
        try:
            result = run(
                content,
                cluster,
                profile=profile,
                emulated=emulated,
                slack=slack,
                noise=noise,
                seed=seed,
                slowdown=slowdown,
                trust_remote_code=trust_remote_code,
            )
        except DeadlockError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(STUCK) from None
        if trace:
            _write_trace(trace, result)
        if picture:
            draw_simulation(picture, result)
    if json:
        print(json_.dumps(_as_json(result), indent=2))
    else:
        _show(result)


def _slowdown(stragglers: list[str], world_size: int, seed: int) -> dict[int, float]:
    generator = random.Random(seed)
    result = {}
    for text in stragglers:
        name, _, factor_text = text.partition(":")
        try:
            rank = generator.randrange(world_size) if name == "any" else int(name)
            factor = float(factor_text)
        except ValueError:
            raise InputError(f"--straggler {text}: expected RANK:FACTOR, such as 3:1.5") from None
        if not 0 <= rank < world_size:
            raise InputError(f"--straggler {text}: the plan has ranks 0 to {world_size - 1}")
        if not 0 < factor <= 1000:
            raise InputError(f"--straggler {text}: expected a factor above 0, at most 1000")
        result[rank] = factor
    return result


def _write_trace(path: Path, result: Simulation) -> None:
    from heteropp.description.chrome_trace import write_chrome_trace
    from heteropp.description.used_chips import chips_in_words
    from heteropp.schedule.flows import flows, sent_bytes, slices_by_rank
    from heteropp.simulator.picture import label, shown

    rows = shown(result)
    first = {a: result.program.seats[a].ranks[0] for a in rows}
    spans = [span for a in rows for span in result.spans_of(a)]
    write_chrome_trace(
        path,
        {"predicted": spans},
        {first[a]: label(result, a) for a in rows},
        {first[a]: result.memory_of(a).points() for a in rows},
        flows={"predicted": flows(result.plan, spans)},
        sent={"predicted": sent_bytes(result.plan, spans)},
        slices=slices_by_rank(result.plan),
        chips=chips_in_words(result.plan),
    )


def _as_json(result: Simulation) -> dict:
    return {
        "step_s": result.step_s,
        "tokens_per_chip_per_s": result.tokens_per_chip_per_s,
        "bubble": result.bubble,
        "stages": [
            {
                "pipeline": pipeline,
                "stage": stage,
                "work": share.work,
                "communication": share.communication,
                "bubble": share.bubble,
            }
            for (pipeline, stage), share in sorted(result.stage_shares.items())
        ],
        "memory_bytes": result.memory_bytes,
        "overruns": result.overruns(),
    }


def _show(result: Simulation) -> None:
    from heteropp.cost.planned import human_bytes

    console = output_console()
    table = Table(
        title=f"one step: {result.step_s * 1e3:.1f} ms, "
        f"{result.tokens_per_chip_per_s:.4g} tokens per chip and second, "
        f"bubble {result.bubble:.1%}",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("", "work", "communication", "bubble", "memory", "of"):
        table.add_column(heading, justify="right" if heading else "left")
    for alike in _alike(result):
        shares = [result.shares[a] for a in alike]
        table.add_row(
            _name(result, alike),
            _span([share.work for share in shares]),
            _span([share.communication for share in shares]),
            _span([share.bubble for share in shares]),
            human_bytes(result.memory_of(alike[0]).peak_bytes),
            human_bytes(result.capacity_bytes(alike[0])),
        )
    console.print(table)
    for sentence in result.overruns():
        console.print(sentence, soft_wrap=True)


def _alike(result: Simulation) -> list[list[int]]:
    """Returns the replicas, in order, together where one row can stand for them.

    They are of one stage and one chip type, work for the same share of the step, and hold as much.
    """
    groups: dict[tuple, list[int]] = {}
    for a, seat in enumerate(result.program.seats):
        work, held = f"{result.shares[a].work:.1%}", result.memory_of(a).peak_bytes
        key = seat.pipeline, seat.stage, _chips(result, a), work, held
        groups.setdefault(key, []).append(a)
    return list(groups.values())


def _chips(result: Simulation, a: int) -> str:
    seat = result.program.seats[a]
    stage = result.plan.pipelines[seat.pipeline].stages[seat.stage]
    return together(stage.replicas[seat.replica].chips)


def _name(result: Simulation, alike: list[int]) -> str:
    seat = result.program.seats[alike[0]]
    where = f"pipeline {seat.pipeline} " if len(result.plan.pipelines) > 1 else ""
    ranks = [rank for a in alike for rank in result.program.seats[a].ranks]
    count = "" if len(alike) == 1 else f"{len(alike)} x "
    several, chips = "s" * (len(ranks) > 1), _chips(result, alike[0])
    return f"{where}stage {seat.stage} rank{several} {ranges(ranks)} ({count}{chips})"


def _span(shares: list[float]) -> str:
    """Returns the least and the largest share, once where they look the same."""
    low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
    return low if low == high else f"{low} - {high}"


def main() -> None:
    app()


if __name__ == "__main__":
    main()
