"""How long every planner takes, beside what was published for it, and what its plans cost.

On random clusters the default planner is held against all others and a longer search, or the best
plan that is known.

One thread. Times are of the search alone, the building of its cost tables included; what the
model's layers do was traced before (the first search of a model traces it, in seconds). Published
times were measured on other machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import random_clusters
import typer
from evidence import Row, row, show

from dicomm.bench.quiet import Watch
from heteropp.cli.errors import one_sentence
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.model import read_model
from heteropp.search.grouping import UnitType, group_devices
from heteropp.search.metis_table import SHAPES, problem, table
from heteropp.search.node_groups import NodeGroups
from heteropp.search.planner import Request, Result, planner
from hyperhetero.cli import CommandLine, output_file
from hyperhetero.progress import Status

# Table 7: (name, cluster, sequences of 4,096 tokens); Table 8: seconds
H2 = [
    ("Exp-A-1", "h2-exp-a", 512, 0.62),
    ("Exp-A-2", "h2-exp-a", 1536, 0.62),
    ("Exp-B-1", "h2-exp-b", 512, 5.48),
    ("Exp-B-2", "h2-exp-b", 2048, 5.48),
    ("Exp-C-1", "h2-exp-c", 1024, 12.29),
    ("Exp-C-2", "h2-exp-c", 2048, 12.29),
    ("Exp-D", "h2-exp-d", 2048, None),
]
# AutoHet's planning times, section V-B: chips: seconds
AUTOHET = {16: 1.23, 24: 5.72, 32: 16.96, 64: 159.12, 512: None}
EIGHT_TYPES = ("a", "b", "c", "d", "a100", "h800", "h20", "v100")

app = CommandLine()


@app.command(help=__doc__)
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each search; medians count.")] = 5,
    metis_limit_s: Annotated[
        float, typer.Option(min=0, help="How long each published Metis search may take.")
    ] = 20.0,
    metis_data: Annotated[
        Path | None, typer.Option(help="A checkout of Metis, for its profiles.")
    ] = None,
    clusters: Annotated[
        int, typer.Option(min=0, help="Random clusters for the default planner.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the first random cluster.")] = 0,
    longer_s: Annotated[
        float, typer.Option(min=1, help="How long another search of each may take.")
    ] = 20.0,
    helped: Annotated[
        bool, typer.Option("--helped", help="Plan them also with what should help: more, faster.")
    ] = False,
    keep: Annotated[
        Path | None,
        output_file(
            "--keep",
            help="Keep the result of each random cluster that has a plan here, and take those from"
            " here that were found with the same --longer-s and --helped. Begin a new file when a"
            " planner has changed.",
        ),
    ] = None,
    best_known: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Compare with the best plans that this file, which --keep has written, has for"
            " clusters from --seed on, in place of longer searches. tools/best_known.jsonl has"
            " those of ten minutes each, from seed 8000 on.",
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option(help="The searches that times were published of.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    parts: dict[str, Callable[[], list[Row]]] = {
        "H2": lambda: h2(rounds),
        "100,000 chips": lambda: many_chips(rounds),
        "Metis": lambda: metis(metis_limit_s, metis_data),
        "AutoHet": lambda: autohet(rounds),
        "Zorse": lambda: zorse(rounds),
    }
    if not published:
        parts = {}
    elif metis_data:
        with one_sentence():
            for shape in SHAPES:
                problem(shape, metis_data)  # of files that are not a checkout's, before any search
    kept = random_clusters.Kept(keep) if keep else None
    known = _known(best_known, clusters, seed, keep) if best_known else []
    rows: list[Row] = []
    watch = Watch()
    with Status("searching") as status:
        if known:
            find = partial(random_clusters.compared, known, helped, status.update)
        else:
            find = partial(
                random_clusters.searched, clusters, seed, longer_s, helped, kept, status.update
            )
        if clusters:
            parts["random clusters"] = lambda: random_clusters.rows(find(), seed, helped)
        for name, part in parts.items():
            status.update(f"searching: {name}")
            watch.spin()
            rows += part()
    show("planner-bench", rows, [" ".join((__doc__ or "").split())], json, watch.result(), {"s"})


def _known(file: Path, clusters: int, seed: int, keep: Path | None) -> list[random_clusters.Found]:
    """Returns what a file has of so many clusters. Raises typer.BadParameter."""
    if keep:
        raise typer.BadParameter(
            "--keep keeps what longer searches find, in whose place --best-known puts plans:"
            " expected one of the two"
        )
    known = random_clusters.Kept(file).since(seed)
    if not known:
        raise typer.BadParameter(f"{file} has no cluster from seed {seed} on")
    return known[:clusters]


def median_s(run: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The median time of a run, and what it gave."""
    times, result = [], None
    for _ in range(rounds):
        began_s = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times), result


def search_s(name: str, request: Request, rounds: int) -> tuple[float, Result]:
    search = planner(name)
    return median_s(lambda: search(request), rounds)


def h2(rounds: int) -> list[Row]:
    """The exact planner and the published search on the paper's experiments."""
    rows, model = [], read_model("h2-100b")
    for name, preset, batch, published_s in H2:
        cluster = read_cluster(preset)
        request = Request(cluster=cluster, model=model, global_batch=batch)
        planner("exact")(request)  # traces the model
        exact_s, found = search_s("exact", request, rounds)
        rows.append(
            row(f"{name} exact, all dp", "s", exact_s, peer=published_s,
                peer_name="H2 Table 8" if published_s else None, bar=0.1)
        )  # fmt: skip
        rows.append(row(f"{name} exact, gap", "%", 100 * found.gap, bar=0.0))
        depth_first_s, theirs = search_s("heteroauto", request, 1)
        rows.append(
            row(f"{name} heteroauto as published", "s", depth_first_s, peer=published_s,
                peer_name="H2 Table 8" if published_s else None)
        )  # fmt: skip
        rows.append(
            row(f"{name} cost, exact", "s", found.best.cost_s, peer=theirs.best.cost_s,
                peer_name="heteroauto")
        )  # fmt: skip
    return rows


def many_chips(rounds: int) -> list[Row]:
    """100,000 chips of eight types, any number of stages of each type."""
    with TemporaryDirectory() as folder:
        cluster = _cluster(Path(folder), {chip: 12_500 for chip in EIGHT_TYPES})
    request = Request(cluster=cluster, model=read_model("h2-100b"), global_batch=25_000)
    planner("exact")(request)
    seconds, found = search_s("exact", request, min(rounds, 3))
    return [
        row("100,000 chips of 8 types, exact", "s", seconds, bar=2.0),
        row("100,000 chips of 8 types, gap", "%", 100 * found.gap),
    ]


def _cluster(folder: Path, chips: dict[str, int]) -> Cluster:
    """Nodes of four chips each."""
    nodes = (f'[[nodes]]\nchip = "{c}"\nchips = 4\ncount = {n // 4}\n' for c, n in chips.items())
    path = folder / "cluster.toml"
    path.write_text('name = "many"\n' + "".join(nodes))
    return read_cluster(path)


def metis(limit_s: float, metis_data: Path | None) -> list[Row]:
    """Seed 001's Table 1: exact on Metis's cost beside both published searches."""
    rows = []
    for shape, found in table(limit_s, metis_data):
        name = f"{shape.layers} layers, {shape.chips} + {shape.chips} chips"
        exact = found["exact"]
        rows.append(row(f"{name}: exact on Metis's cost", "s", exact.seconds, bar=1.0))
        gap = 100 * (exact.cost_s / exact.lower_bound_s - 1)
        rows.append(row(f"{name}: exact, gap", "%", gap, bar=0.01))
        for planner_name in ("metis", "metis-oom"):
            theirs = found[planner_name]
            words = f"{planner_name}: {theirs.steps:,} steps in {theirs.seconds:.3g} s" + (
                "" if theirs.complete else ", cut off"
            )
            rows.append(
                row(f"{name}: cost", "s", exact.cost_s, peer=theirs.cost_s, peer_name=words,
                    bar=theirs.cost_s)
            )  # fmt: skip
    return rows


def autohet(rounds: int) -> list[Row]:
    """Grouping (equation 3) of A100, H800 and H20 chips, a model that needs two of them."""
    rows = []
    for chips, published_s in AUTOHET.items():
        a100, h800 = chips // 2, chips // 4
        types = [
            UnitType(a100, 312.0, 80.0),
            UnitType(h800, 989.0, 80.0),
            UnitType(chips - a100 - h800, 148.0, 96.0),
        ]
        seconds, found = median_s(lambda types=types: group_devices(types, 150.0, 2048), rounds)  # type: ignore[misc]
        assert found is not None
        rows.append(
            row(f"AutoHet's grouping, {chips} chips", "s", seconds, peer=published_s,
                peer_name="AutoHet with SCIP, section V-B" if published_s else None,
                bar={64: 0.05, 512: 10.0}.get(chips))
        )  # fmt: skip
    return rows


def zorse(rounds: int) -> list[Row]:
    """Zorse's division into groups of 1,024 chips, five kinds of node, two regions."""
    text = 'name = "1,024 chips"\n'
    for chip, count, region in (
        ("t4", 40, "one"), ("v100", 24, "one"), ("a10g", 24, "other"),
        ("a100", 20, "other"), ("t4", 20, "other"),
    ):  # fmt: skip
        text += f'[[nodes]]\nchip = "{chip}"\ncount = {count}\nregion = "{region}"\n'
    text += '[[links]]\nbetween = ["one", "other"]\nlatency_s = 0.02\nbytes_per_s = 1e9\n'
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(text)
        cluster = read_cluster(path)
    seconds, divisions = median_s(lambda: NodeGroups(cluster).divisions(), rounds)
    return [
        row(f"Zorse's partition of {cluster.world_size:,} chips, {len(divisions)} divisions",
            "s", seconds, bar=0.5)
    ]  # fmt: skip


if __name__ == "__main__":
    app()
