"""heteropp-simulate: runs a plan on predicted times, without chips, and shows when what happens."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heteropp.cli.errors import one_sentence
from heteropp.cluster import read_cluster
from heteropp.plan import read_plan
from heteropp.timeline import draw_timeline, write_chrome_trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXAMPLES = """\b
Examples:
  heteropp-simulate --plan plan.json --cluster cluster.toml
  heteropp-simulate --plan plan.json --cluster cluster.toml --picture plan.png
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def simulate(
    plan: Annotated[Path, typer.Option(help="What heteropp-search wrote.")],
    cluster: Annotated[Path, typer.Option(help="The cluster file of the plan.")],
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the timeline here (PNG).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    with one_sentence():
        content, machines = read_plan(plan), read_cluster(cluster)
        # torch, which the cost model traces with, is a second's import
        from heteropp.planned import check_cluster, rank_memory
        from heteropp.simulate import simulate as run

        check_cluster(content, machines)
        result = run(content, machines)
        memory = [term.total for term in rank_memory(content)]
        labels = [f"rank {r} ({machines.node(r).chip_name})" for r in range(content.world_size)]
        if trace:
            write_chrome_trace(trace, {"predicted": result.spans})
        if picture:
            draw_timeline(picture, {"predicted": result.spans}, labels)
    idle = [1 - result.busy_s[rank] / result.step_s for rank in range(content.world_size)]
    if json:
        print(
            json_.dumps({"step_s": result.step_s, "idle": idle, "memory_bytes": memory}, indent=2)
        )
        return
    table = Table(title=f"one step: {result.step_s * 1e3:.1f} ms", box=box.SIMPLE_HEAD)
    for heading in ("rank", "busy", "idle", "memory"):
        table.add_column(heading, justify="left" if heading == "rank" else "right")
    for rank, label in enumerate(labels):
        table.add_row(
            label,
            f"{result.busy_s[rank] * 1e3:.1f} ms",
            f"{idle[rank]:.1%}",
            f"{memory[rank] / 2**20:.1f} MiB",
        )
    Console(highlight=False).print(table)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
