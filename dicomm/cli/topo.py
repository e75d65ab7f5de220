"""dicomm topo."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from dicomm.cli.errors import InputError, one_sentence
from dicomm.topology import Choice, Nic, Topology, choose, discover, nics_named
from dicomm.topology.outline import Box, outline, vendor_name
from hyperhetero.cli import output_file

EXAMPLES = """\b
Examples:
  dicomm topo
  dicomm topo --nics mlx5_0:1,mlx5_1 --json
  dicomm topo --sys-root recorded/sys --plot server.svg
"""

PICTURES = (".png", ".svg", ".pdf")


def topo(
    sys_root: Annotated[
        Path, typer.Option(help="The sysfs tree: this machine's, or a recorded one.")
    ] = Path("/sys"),
    nics: Annotated[
        str,
        typer.Option(
            envvar="DICOMM_NICS",
            help="The job's own choice instead of affinity: device[:port],...",
        ),
    ] = "",
    chip: Annotated[
        list[str] | None,
        typer.Option(help="The PCI address of an accelerator whose PCI class does not say so."),
    ] = None,
    plot: Annotated[
        Path | None, output_file(help="Draw the server: a .png, .svg or .pdf file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """What chips and NICs this node has, how near they are, and which NICs each chip uses."""
    with one_sentence():
        if plot and plot.suffix not in PICTURES:
            raise InputError(f"--plot {plot}: expected a file that ends in {', '.join(PICTURES)}")
        if plot and not plot.parent.is_dir():
            raise InputError(f"--plot {plot}: there is no folder {plot.parent}")
        topology = discover(sys_root, chip or [])
        if nics:
            nics_named(topology, nics)  # refused even where there is no chip to use them
        choices = choose(topology, nics)
        if plot:
            from dicomm.topology.draw import draw  # matplotlib is a second's import

            draw(topology, choices, plot)
    if json:
        print(json_.dumps(_as_dict(topology, choices), indent=2))
        return
    console = Console(highlight=False)
    if not topology.chips and not topology.nics:
        console.print(f"no chip and no RDMA NIC below {sys_root}", soft_wrap=True, markup=False)
    else:
        console.print(_tree(topology))
        console.print(_table(topology, choices))
    if plot:
        console.print(f"drawn to {plot}", soft_wrap=True, markup=False)


def _tree(topology: Topology) -> Tree:
    def grow(tree: Tree, its: Box) -> Tree:
        for chip in its.chips:
            tree.add(f"[bold cyan]chip {chip}[/] {vendor_name(topology, chip)}")
        for nic in its.nics:
            style = "bold green" if nic.active else "dim"
            tree.add(f"[{style}]NIC {nic.name}[/] {describe(nic)}")
        for inner in its.boxes:
            grow(tree.add(inner.title), inner)
        return tree

    server = outline(topology)
    return grow(Tree(server.title), server)


def describe(nic: Nic) -> str:
    """The NIC's network, rate and state, as far as known."""
    rate = f"{nic.bytes_per_s * 8 / 1e9:g} Gb/s" if nic.bytes_per_s else ""
    return " ".join(part for part in (nic.network, nic.link_layer, rate, nic.state) if part)


def _table(topology: Topology, choices: list[Choice]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("chip", no_wrap=True)
    table.add_column("its own NIC", style="bold")
    table.add_column("further rails")
    table.add_column("why")
    table.add_column("hops", justify="right")
    for choice in choices:
        names = [nic.name for nic in choice.nics]
        hops = str(choice.distances[0].hops or "") if choice.nics else ""
        table.add_row(
            choice.chip, names[0] if names else "-", " ".join(names[1:]), choice.why, hops
        )
    return table


def _as_dict(topology: Topology, choices: list[Choice]) -> dict[str, Any]:
    return {
        "numa_nodes": [
            {"id": node.id, "cpus": node.cpus, "distances": node.distances}
            for node in topology.numa_nodes
        ],
        "nics": [
            {
                "name": nic.name,
                "active": nic.active,
                "state": nic.state,
                "link_layer": nic.link_layer,
                "bytes_per_s": nic.bytes_per_s,
                "network": nic.network,
                "pci_address": nic.pci_address,
            }
            for nic in topology.nics
        ],
        "chips": [
            {
                "address": choice.chip,
                "vendor": vendor_name(topology, choice.chip),
                "numa_node": topology.pci[choice.chip].numa_node,
                "path": topology.pci[choice.chip].path,
                "why": choice.why,
                "nics": [
                    {
                        "name": nic.name,
                        "nearness": its.nearness,
                        "hops": its.hops,
                        "numa_distance": its.numa_distance,
                    }
                    for nic, its in zip(choice.nics, choice.distances, strict=True)
                ],
            }
            for choice in choices
        ],
    }
