"""What a change of the cluster costs.

Recovery: AutoHet's scenarios A, B and C under the bandwidths that its paper states, bytes and time
scaled down, beside fetching the whole state from the remote store.

Switching: 75 MiB of state from plan to plan, planning included, over shared memory on the host.

Traces: Hetu's C1 to C7, in which chips are lost, then the rest of their nodes, beside a restart on
whole nodes.

Mixed lengths: documents under a plan for each length of sequence, beside packing with one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated

import typer
from elastic.mixed_lengths import mixed_length_rows
from elastic.recovery import recovery_rows, scale
from elastic.scenarios import GPT3
from elastic.switching import switching_rows
from elastic.traces import trace_rows
from evidence import Row
from pipelines.ranks import BadInput
from pipelines.turns import report

from dicomm.bench.quiet import Quiet
from hyperhetero.cli import CommandLine

app = CommandLine()


class Part(Enum):
    recovery = "recovery"
    switching = "switching"
    traces = "traces"
    mixed_lengths = "mixed-lengths"


REST: dict[Part, Callable[[], tuple[list[Row], Quiet]]] = {
    Part.switching: switching_rows,
    Part.traces: trace_rows,
    Part.mixed_lengths: mixed_length_rows,
}


@app.command(
    help=__doc__,
    epilog="Examples:  tools/elastic-bench  |  tools/elastic-bench --only recovery --model 6.7B",
)
def main(
    only: Annotated[
        list[Part] | None, typer.Option(help="Parts to run, repeatable; all if absent.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"Sizes of GPT-3: {', '.join(GPT3)}, repeatable; all if absent."),
    ] = None,
    remote_s: Annotated[
        float, typer.Option(min=0.5, help="How long the remote store takes for the whole state.")
    ] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    models, wanted, notes = model or list(GPT3), only or list(Part), [__doc__ or ""]
    if Part.recovery in wanted:
        notes += [scale(name, remote_s) for name in models if name in GPT3]
    report("elastic-bench", " ".join(notes), parts(wanted, models, remote_s), json)


def parts(
    wanted: list[Part], models: list[str], remote_s: float
) -> Iterator[tuple[list[Row], Quiet]]:
    """Raises BadInput or Failed."""
    for name in models:
        if name not in GPT3:
            raise BadInput(f"--model is {name}; expected one of {', '.join(GPT3)}")
    if Part.recovery in wanted:
        yield recovery_rows(models, remote_s)
    for part, rows in REST.items():
        if part in wanted:
            yield rows()


if __name__ == "__main__":
    app()
