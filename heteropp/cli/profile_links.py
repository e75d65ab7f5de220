"""heteropp-profile: two chips of each kind of pair measure the link between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from heteropp.api.errors import InputError
from heteropp.cli.profile_blocks import open_profile
from heteropp.description.cluster import Cluster
from heteropp.description.profile import pair_kinds, read_profile, write_profile
from heteropp.models.spec import ModelSpec

if TYPE_CHECKING:
    from heteropp.profiling.links import LinkRun


def _link_run(cluster: Cluster, path: Path, output: Path, everyone: bool) -> LinkRun:
    from heteropp.profiling.links import LinkRun

    pairs = tuple((kind, *ranks) for kind, ranks in sorted(pair_kinds(cluster).items()))
    ranks = sorted({rank for _, *two in pairs for rank in two})
    if everyone:
        ranks = list(range(cluster.world_size))
    chips = tuple((str(cluster.chip(r).path), cluster.chip(r).chip_type) for r in ranks)
    return LinkRun(path, tuple(ranks), chips, pairs, output, output.parent / "profile-logs")


def check_ranks(cluster: Cluster, path: Path, output: Path) -> None:
    """Raises FileError where this machine cannot start the ranks that measure the links."""
    from heteropp.runtime.ranks.launch import check_shared_memory

    check_shared_memory(len(_link_run(cluster, path, output, everyone=False).ranks))


def measure(cluster: Cluster, path: Path, output: Path) -> None:
    """Adds the links that the profile lacks to it, measured by processes of this machine."""
    known = {link.pair for link in read_profile(output).links}
    if known.issuperset(pair_kinds(cluster)):
        return
    from heteropp.profiling.links import measure_links
    from heteropp.runtime.ranks.launch import launch

    run = _link_run(cluster, path, output, everyone=False)
    labels = tuple(
        f"rank {rank} (chip {chip[1]})" for rank, chip in zip(run.ranks, run.chips, strict=True)
    )
    code = launch(measure_links, run, labels=labels, logs=run.logs, what="profiling")
    if code:
        raise typer.Exit(code)


def measure_here(cluster: Cluster, model: ModelSpec, path: Path, output: Path) -> None:
    """Measures the links, where this process is one of the ranks that a launcher started.

    Raises InputError unless as many were started as the cluster has.
    """
    from heteropp.profiling.links import measure_links

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != cluster.world_size:
        raise InputError(
            f"cluster {cluster.name} has {cluster.world_size} ranks; {world_size} were started"
        )
    if os.environ["RANK"] == "0":
        write_profile(open_profile(output, cluster, model), output)
    measure_links(_link_run(cluster, path, output, everyone=True))
