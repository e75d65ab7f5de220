"""heteropp-profile: measures a cluster's chips and links for a model, for heteropp-search.

One chip of each type runs blocks of 1, 2, 4 ... layers, and the model's two
ends; then two chips of each kind of pair send each other messages. Started
again, it goes on where its file ends.

With --kernels, a chip of each type runs single operators of many shapes
instead: products of matrices, attention and moves in the model's dtype. A few
figures are fitted to their times, with the time of a launch and the host's
part, and written into a chip file, by which heteropp-search plans any model.
"""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from heteropp.cli.errors import one_sentence
from heteropp.cli.trust import TrustRemoteCode
from heteropp.models.spec import LARGEST
from hyperhetero.cli import CommandLine, output_file, output_folder

if TYPE_CHECKING:
    from heteropp.description.profile import Profile

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-profile --cluster cluster.toml --model model.toml -o profile.json
  heteropp-profile --cluster cluster.toml --model model.toml \\
    --tp 1 --tp 2 --sequences 4
  heteropp-profile ... --chip a --no-links    # on a node of chips A
  torchrun --nnodes 2 ... -m heteropp.cli.profile ...    # links between nodes
  heteropp-profile --cluster cluster.toml --model model.toml --kernels chips/
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def profile(
    cluster: Annotated[Path, typer.Option(help="The cluster file (TOML), or a preset's name.")],
    model: Annotated[
        Path, typer.Option(help="The model file, a Hugging Face folder, or a preset's name.")
    ],
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, max=LARGEST, help="Tokens per sequence; the model file's if absent."),
    ] = None,
    output: Annotated[Path, output_file("--output", "-o", help="The profile to write.")] = Path(
        "profile.json"
    ),
    chip: Annotated[
        list[str] | None, typer.Option(help="Only this chip of the cluster file; repeatable.")
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tensor-parallel degrees; all that suit chip and model if absent."
        ),
    ] = None,
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Sequences of a micro-batch in each replica, repeatable; 1 if absent."
        ),
    ] = None,
    most_layers: Annotated[
        int, typer.Option(min=1, help="The most layers that a measured block has.")
    ] = 8,
    trust_remote_code: TrustRemoteCode = False,
    kernels: Annotated[
        Path | None,
        output_folder(
            help="Measure single operators instead, and write chip files in this folder."
        ),
    ] = None,
    links: Annotated[bool, typer.Option("--links/--no-links", help="Measure links too.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    console = Console(highlight=False, markup=False)
    with one_sentence():
        from heteropp.api.attention import says_attention, with_usual_attention
        from heteropp.api.training.place import launched, take_place
        from heteropp.cli import profile_blocks, profile_links
        from heteropp.description.cluster import read_cluster
        from heteropp.description.files import check_file
        from heteropp.description.model import read_model
        from heteropp.description.profile import read_profile

        check_file(output)
        machines = read_cluster(cluster)
        shape = read_model(model, sequence_length, trust_remote_code=trust_remote_code)
        if not says_attention(model):
            shape = with_usual_attention(shape, machines)
        chips = profile_blocks.check_chips(machines, chip)
        if kernels is not None:
            from heteropp.cli.profile_kernels import measure_kernels

            with _failed_chip():
                measure_kernels(machines, shape, chips, kernels, json)
            return
        wanted = profile_blocks.wanted(machines, shape, chips, tp, sequences or [1], most_layers)
        if launched():  # every rank of the cluster takes part
            take_place(cluster)
            profile_links.measure_here(machines, shape, cluster, output)
            return
        if links:
            profile_links.check_ranks(machines, cluster, output)
        started = profile_blocks.open_profile(output, machines, shape)
        with _failed_chip():
            notes = profile_blocks.measure(started, wanted, machines, output)
        if links:
            profile_links.measure(machines, cluster, output)
        found = read_profile(output)
    if json:
        print(json_.dumps({"citation": found.citation, **asdict(found)}, indent=2))
        return
    _show(console, found)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"{found.citation}, written to {output}", soft_wrap=True)


@contextmanager
def _failed_chip() -> Iterator[None]:
    from heteropp.cli.profile_blocks import ChipProcessError

    try:
        yield
    except ChipProcessError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


def _show(console: Console, profile: Profile) -> None:
    """A table of the blocks, in milliseconds, and one of the links."""
    table = Table(title=f"profile {profile.name}, ms", box=None, padding=(0, 1, 0, 0))
    for heading in ("chip", "tp", "seqs", "block"):
        table.add_column(heading, no_wrap=True)
    terms = ("forward", "recompute", "backward_input", "backward_weight", "update")
    for heading in ("forward", "recompute", "input", "weight", "update"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measured in profile.blocks:
        block = measured.block
        ends = ("tokens, " if block.first else "") + str(block.layers)
        name = ends + (", head" if block.last else "")
        cells = (f"{getattr(measured, f'{term}_s') * 1e3:.3f}" for term in terms)
        table.add_row(block.chip, str(block.tp), str(block.sequences), name, *cells)
    console.print(table)
    if not profile.links:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("link", "", "latency, us", "MB/s"):
        table.add_column(heading, no_wrap=True)
    for link in profile.links:
        between = [
            f"{c} at {p}" if p else c
            for c, p in zip(link.pair.chips, link.pair.places, strict=True)
        ]
        where = "same node" if link.pair.same_node else "between nodes"
        row = f"{link.latency_s * 1e6:.1f}", f"{link.bytes_per_s / 1e6:.1f}"
        table.add_row(" to ".join(between), where, *row)
    console.print(table)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
