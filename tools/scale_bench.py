"""What ranks, their groups and protected messages cost, and how that grows with the job.

The ranks run on this host, all of them, so that the figures of one rank are those of a job of that
size, but its times are those of as many ranks on these cores. Those of dicomm-scale, in C++, train
nothing; those that heteropp-train starts train a small model on emulated chips. Jobs of several
sizes tell how a rank's costs grow, and what they are in a job that no machine here holds.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from evidence import Row, row, show
from scale import Failed, bare_ranks
from scale.growth import growth_rows
from scale.processes import adopt_orphans
from scale.protection import protection_rows
from scale.sizes import (
    BARE_SIZES,
    FEWEST_BARE,
    FEWEST_TRAINING,
    MACHINE_RANKS,
    MANY,
    TRAINING_SIZES,
    doublings,
    why_too_few,
)

from dicomm.bench.cpp import SCALE, why_absent
from dicomm.bench.quiet import Watch
from hyperhetero.cli import CommandLine

app = CommandLine()
NOTES = [
    "figures are those of the rank that has the most; resident memory contains the shared memory, "
    "which is counted for both of the ranks that use it",
    "a rank's requests of the store: of Communicator::create() and subgroup(), and its peers' "
    "contacts; of ranks that train all that torch's store is asked",
    "a plan's groups: tensor parallelism over up to 8 ranks, data parallelism over the others of a "
    "stage, of which there are 2; each is used, an all-reduce over all ranks with them",
]
GROWTH_NOTES = [
    "the law is a + b * log2(ranks), fitted to the figures of several sizes of job; memory is the "
    "law's, and what a rank keeps for all others before it is connected",
    "communication of the start: the requests of all ranks, as a store serves them that has a core "
    "of this host for itself, and a rank's CPU time, also what of it is no communication",
    "of requests the growth rows have the mean of all ranks where they do not say otherwise; who "
    "waits for a rank that starts late looks again, at last five times a second, which depends on "
    "how unevenly ranks start and is left out",
]
TRAINING_NOTE = (
    f"ranks that train take themselves for ranks of machines of {MACHINE_RANKS}, and of memory "
    "that more share here they are given as large a part as there; descriptors are without those "
    "that torch's launcher leaves in them for ranks of other machines; their CPU time is the mean"
)


def growth(bare: int, training: int, watch: Watch) -> list[Row]:
    """What the series up to these sizes tell; 0: not that one. Raises Failed."""
    from scale import training_ranks  # torch is seconds' import
    from scale.store_rate import requests_per_s

    rate, kept_mib = requests_per_s(), bare_ranks.kept_mib(MANY)
    rows = [
        row("torch's store: requests, by its CPU time", "1/s", rate, better="higher"),
        row(f"memory that a rank keeps for all of {MANY:,}", "MiB", kept_mib),
    ]
    for transport in bare_ranks.TRANSPORTS if bare else ():
        series = {}
        for ranks in doublings(bare, BARE_SIZES, FEWEST_BARE):
            series[ranks] = bare_ranks.with_a_plans_groups(ranks, transport)
            watch.spin()
        rows += growth_rows(f"C++, {transport}", series, rate, kept_mib)
    if training:
        series = {}
        for ranks in doublings(training, TRAINING_SIZES, FEWEST_TRAINING):
            series[ranks] = training_ranks.measure(ranks)
            watch.spin()
        name = f"training, {training} ranks: from the command to the end of step 1"
        rows.append(row(name, "s", series[training]["start-up"]))
        rows += growth_rows("training", series, rate, kept_mib)
    return rows


@app.command(
    epilog="Examples:  tools/scale-bench  |  tools/scale-bench --ranks 128 --json  |  "
    "tools/scale-bench --training-ranks 64"
)
def main(
    ranks: Annotated[
        int, typer.Option(min=2, max=1024, help="C++ ranks that are all connected.")
    ] = 16,
    groups: Annotated[int, typer.Option(min=1, help="Groups of all of these.")] = 50,
    largest: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="C++ ranks of the largest job of a series with a plan's groups; 0: no series.",
        ),
    ] = 256,
    training_ranks: Annotated[
        int,
        typer.Option(
            min=0, max=256, help="Ranks of the largest job of a series that trains; 0: no series."
        ),
    ] = 0,
    protection: Annotated[
        bool, typer.Option(help="What DICOMM_SECURITY costs messages over TCP.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
) -> None:
    """What a job's ranks and groups cost, and how that grows with the job."""
    why = (
        (largest and why_too_few("--largest", largest, FEWEST_BARE))
        or (training_ranks and why_too_few("--training-ranks", training_ranks, FEWEST_TRAINING))
        or why_absent(SCALE)
    )
    if why:
        print(f"scale-bench: {why}", file=sys.stderr)
        raise typer.Exit(2)
    adopt_orphans()
    watch, rows, notes = Watch(), [], list(NOTES)
    try:
        for transport in bare_ranks.TRANSPORTS:
            figures = bare_ranks.measure(ranks, groups, transport)
            rows += bare_ranks.rows_of(ranks, groups, transport, figures)
            watch.spin()
        if protection:
            rows += protection_rows()
            watch.spin()
        if largest or training_ranks:
            rows += growth(largest, training_ranks, watch)
            notes += GROWTH_NOTES
        if training_ranks:
            notes.append(TRAINING_NOTE)
    except Failed as error:
        print(f"scale-bench: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    show("scale-bench", rows, notes, as_json, watch.result())


if __name__ == "__main__":
    app()
