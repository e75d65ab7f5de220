"""Step 4: messages and reductions between two processes on one GPU."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from evidence import Row, row

from dicomm.bench.rounds import Results, compete
from dicomm.bench.team import Team
from dicomm.bench.timing import window_of
from gpu_check.message_ranks import ALL_REDUCE, COPY, DICOMM, GLOO, GROUPS, RankSetup
from gpu_check.part import Found, Part
from gpu_check.processes import StepError

SIZES = {"8 B": 8, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
KINDS = ("latency", "uni", ALL_REDUCE)
REPEATS, REHEARSED_REPEATS, ROUND_S = 5, 1, 0.05


def found(part: Part, folder: Path) -> Found:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        entries = [
            (name, partial(Team, name, RankSetup(name, place, dict(part.environment))))
            for name in GROUPS
        ]
        cases = [(kind, size) for size in SIZES.values() for kind in KINDS]
        repeats = REHEARSED_REPEATS if part.is_rehearsed else REPEATS
        results = compete(entries, cases, repeats, ROUND_S)
    for name, why in results.missing.items():
        raise StepError(f"{name}: {why}")
    notes = [f"messages: {results.quiet.sentence}"] if results.quiet else []
    return Found(
        [each for name, size in SIZES.items() for each in _rows(results, name, size)], notes
    )


def _rows(results: Results, name: str, size: int) -> list[Row]:
    def us(contestant: str, kind: str) -> float:
        return results.timings[contestant, (kind, size)].p50_us

    def gb_s(contestant: str) -> float:
        return window_of(size) * size / us(contestant, "uni") / 1e3

    latency = f"dicomm, {name}: latency"
    bandwidth = f"dicomm, {name}: bandwidth"
    rows = []
    for peer in (GLOO, COPY):
        rows.append(
            row(latency, "us", us(DICOMM, "latency"), peer=us(peer, "latency"), peer_name=peer)
        )
    for peer in (GLOO, COPY):
        rows.append(
            row(bandwidth, "GB/s", gb_s(DICOMM), peer=gb_s(peer), peer_name=peer, better="higher")
        )
    for peer in (GLOO, COPY):
        ours, theirs = us(DICOMM, ALL_REDUCE), us(peer, ALL_REDUCE)
        rows.append(row(f"dicomm, {name}: all_reduce", "us", ours, peer=theirs, peer_name=peer))
    return rows
