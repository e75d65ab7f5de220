"""heteropp-cluster: writes the cluster file that every other command reads, and shows one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table

from heteropp.api.console import output_console
from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from hyperhetero.cli import CommandLine, output_file
from hyperhetero.progress import Progress

if TYPE_CHECKING:
    from heteropp.description.cluster import Cluster
    from heteropp.inventory.machines import Machine

app = CommandLine(help=__doc__, no_args_is_help=True)

INIT_EXAMPLES = """\b
Examples:
  heteropp-cluster init                                    asks
  heteropp-cluster init --add "2x8 a100" --add "4x8 h20" -o mixed.toml
  heteropp-cluster init --hosts gpu1,gpu2,npu1 -o mine.toml
  scontrol show node | heteropp-cluster init --slurm - -o ours.toml
"""
ADDED = re.compile(r"\s*([0-9]{1,18})\s*x\s*([0-9]{1,18})\s+(\S+)\s*")
Name = Annotated[str | None, typer.Option(help="The cluster's name; the file's name if absent.")]


@app.command(epilog=INIT_EXAMPLES)
def init(
    output: Annotated[
        Path, output_file("--output", "-o", help="The cluster file to write.")
    ] = Path("cluster.toml"),
    name: Name = None,
    add: Annotated[
        list[str] | None,
        typer.Option(help='Nodes to add: "2x8 a100" is two nodes of eight A100s; repeatable.'),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Machines to ask by ssh, separated by commas, or a file with one in each line."
        ),
    ] = None,
    slurm: Annotated[
        Path | None, typer.Option(help="What `scontrol show node` printed; - for standard input.")
    ] = None,
    chip: Annotated[
        str | None,
        typer.Option(
            help="A chip's name or file, for the chips of --hosts and --slurm that none of ours "
            "describes."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Writes a cluster file: from what is given, from the machines themselves, or by asking."""
    with one_sentence():
        from heteropp.description.chips import ChipFileError
        from heteropp.description.cluster_writer import write_cluster
        from heteropp.inventory.machines import InventoryError, cluster_of

        if output.exists() and not force:
            raise InputError(f"{output} is there already; expected another --output, or --force")
        try:
            machines = [machine for text in add or [] for machine in _added(text)]
            machines += _found(hosts, slurm, chip)
            if add is None and hosts is None and slurm is None:
                machines = _asked()
            cluster = cluster_of(name or output.stem, machines)
        except (InventoryError, ChipFileError) as error:
            raise InputError(str(error)) from None
        write_cluster(cluster, output)
    console = output_console()
    _show(console, cluster)
    console.print(f"written to {output}", soft_wrap=True)


@app.command()
def show(
    cluster: Annotated[str, typer.Argument(help="A cluster file, or a preset's name.")],
) -> None:
    """Shows the chips of a cluster file and what links them."""
    with one_sentence():
        from heteropp.description.cluster import read_cluster

        found = read_cluster(cluster)
    _show(output_console(), found)


def _added(text: str) -> list[Machine]:
    from heteropp.description.cluster import LARGEST
    from heteropp.inventory.machines import Machine

    match = ADDED.fullmatch(text)
    if match is None or not int(match[1]):
        raise InputError(f'--add is {text!r}; expected nodes, chips and chip, such as "2x8 a100"')
    nodes, chips = int(match[1]), int(match[2])
    if nodes * chips > LARGEST:
        raise InputError(f"--add {text!r} has {nodes * chips} chips; expected at most {LARGEST}")
    return [Machine(match[3], chips)] * nodes


def _found(hosts: str | None, slurm: Path | None, chip: str | None) -> list[Machine]:
    from heteropp.description.files import read_text
    from heteropp.inventory.hosts import machines_at
    from heteropp.inventory.slurm import machines_of

    machines: list[Machine] = []
    if slurm is not None:
        text = sys.stdin.read() if str(slurm) == "-" else read_text(slurm)
        machines += machines_of(text, chip)
    if hosts is not None:
        # Path.is_file would raise OSError for a list that is too long for the name of a file
        is_file = os.path.isfile(hosts)
        text = read_text(Path(hosts)) if is_file else hosts.replace(",", "\n")
        names = [line.strip() for line in text.splitlines() if line.strip()]
        columns = (TextColumn("asking the hosts"), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(names))
            machines += machines_at(names, chip, lambda: progress.advance(task))
    return machines


def _asked() -> list[Machine]:
    """Asks a person for the machines, chip type by chip type."""
    from heteropp.description.chips import chip_names, load_chip
    from heteropp.inventory.machines import Machine

    print(f"chips that are described: {', '.join(chip_names())}", file=sys.stderr)
    machines: list[Machine] = []
    while True:
        question = "another chip (Enter: no more)" if machines else "chip, or the path of its file"
        chip = typer.prompt(
            question, default="" if machines else None, show_default=False, err=True
        )
        if not chip:
            return machines
        known = load_chip(chip)
        nodes = typer.prompt("how many machines with it", type=int, err=True)
        chips = typer.prompt("chips in each", default=known.chips_per_node, err=True)
        nics = typer.prompt("network cards in each", default=known.links.nics_per_node, err=True)
        rate = known.links.nic_bytes_per_s * 8e-9
        gbit = typer.prompt("Gbit/s of each card", default=round(rate, 3), err=True)
        nic_bytes_per_s = None if gbit == round(rate, 3) else gbit * 1e9 / 8
        machines += [Machine(chip, chips, "", nics, nic_bytes_per_s)] * nodes


def _show(console: Console, cluster: Cluster) -> None:
    table = Table(title=f"cluster {cluster.name}", box=None, padding=(0, 2, 0, 0))
    for heading in ("chip", "vendor", "nodes", "chips"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "bfloat16", "in a node", "NICs"):
        table.add_column(heading, justify="right", no_wrap=True)
    kinds: dict[tuple, int] = {}
    for node in cluster.nodes:
        kind = node.chip_name, node.chip, len(node.ranks), node.place
        kinds[kind] = kinds.get(kind, 0) + 1
    for (name, chip, chips, place), count in kinds.items():
        links = chip.links
        table.add_row(
            name,
            chip.vendor,
            f"{count}{f' in {place}' if place else ''}",
            f"{count} x {chips} = {count * chips}",
            f"{chip.memory.capacity_bytes / 2**30:,.4g} GiB",
            f"{chip.compute.bfloat16_flops / 1e12:,.4g} TFLOPS",
            f"{links.intra_node_bytes_per_s / 1e9:,.4g} GB/s",
            f"{links.nics_per_node} x {links.nic_bytes_per_s / 1e9:,.4g} GB/s",
        )
    console.print(table)
    for link in cluster.fabric.links:
        ends = " and ".join(link.between)
        console.print(f"between {ends}: {link.bytes_per_s / 1e9:,.4g} GB/s")
    nodes = len(cluster.nodes)
    console.print(f"{cluster.world_size} chips in {nodes} node{'s' if nodes > 1 else ''}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
