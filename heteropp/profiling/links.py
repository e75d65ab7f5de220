"""Measures links: one process a chip, two of them at a time sending a message to and fro."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from torch.distributed.rendezvous import rendezvous

from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.files import FileError, write_text
from heteropp.description.profile import MeasuredLink, PairKind, read_profile, write_profile
from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.device import Device, open_device
from heteropp.runtime.ranks.transport import connect
from heteropp.runtime.ranks.watch import CAUSE_FILE
from hyperhetero.progress import Progress

SMALL_BYTES, LARGEST_BYTES = 8, 64 << 20
LONG_S = 0.02  # a message that takes so long tells the bandwidth
# the quickest counts: what is slower was held up
SMALL_REPEATS, LARGE_REPEATS = 100, 20


@dataclass(frozen=True)
class LinkRun:
    """Which links to measure; `ranks` are numbered as in the cluster, one for each process."""

    cluster: Path
    ranks: tuple[int, ...]
    chips: tuple[tuple[str, str], ...]  # chip file and chip type, by process
    pairs: tuple[tuple[PairKind, int, int], ...]  # a kind, and two ranks that are one
    output: Path  # the profile, which the first process adds to
    logs: Path


def measure_links(run: LinkRun) -> None:
    """Measures the links as the process that torchrun's environment names.

    On failure it says why, leaves the sentence for the launcher and exits with code 1.
    """
    torch.set_num_threads(1)
    store, rank, world_size = next(rendezvous("env://"))
    try:
        _measure_links(run, Control(store, rank, world_size))
    except Exception as error:
        label = f"rank {run.ranks[rank]} (chip {run.chips[rank][1]})"
        sentence = f"{label} failed: {' '.join(str(error).split())}"
        print(sentence, file=sys.stderr)
        with contextlib.suppress(FileError):
            write_text(run.logs / CAUSE_FILE, sentence)  # for the launcher
        sys.exit(1)


def _measure_links(run: LinkRun, control: Control) -> None:
    rank, world_size, store = control.rank, control.world_size, control.store
    device = open_device("chip", *run.chips[rank])
    connect(store, rank, world_size, device.backend)
    cluster = read_cluster(run.cluster)
    _pace(run, rank, cluster)
    console = Console(stderr=True, quiet=rank != 0)
    columns = TextColumn("{task.description}"), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        missing = _missing(run, control)
        task = progress.add_task("links", total=len(missing))
        for index in missing:
            kind, source, destination = run.pairs[index]
            pair = run.ranks.index(source), run.ranks.index(destination)
            if rank in pair:
                room = min(cluster.chip(r).memory.capacity_bytes for r in (source, destination))
                size = min(LARGEST_BYTES, room // 4)
                latency_s, byte_s = _measure(rank, pair, device, store, f"link/{index}", size)
                if rank == pair[0]:
                    store.set(f"link/{index}", f"{latency_s} {byte_s}")
            if rank == 0:
                latency_s, byte_s = map(float, store.get(f"link/{index}").split())
                _keep(
                    run.output, MeasuredLink(pair=kind, latency_s=latency_s, bytes_per_s=1 / byte_s)
                )
            control.barrier(f"link/{index}")
            progress.advance(task)
    dist.destroy_process_group()
    control.leave()


def _missing(run: LinkRun, control: Control) -> list[int]:
    """Returns the indices of the pairs that the profile does not have yet.

    The first process reads the profile for all, as the others may not see the file.
    """
    if control.rank == 0:
        known = {link.pair for link in read_profile(run.output).links}
        missing = [i for i, (kind, *_) in enumerate(run.pairs) if kind not in known]
        control.store.set("missing", json.dumps(missing))
    found: list[int] = json.loads(control.store.get("missing"))
    return found


def _pace(run: LinkRun, rank: int, cluster: Cluster) -> None:
    """Makes emulated chips' links as fast as the cluster file says."""
    import dicomm.distributed
    import ditorch

    if not ditorch.is_emulated():
        return
    links = {
        peer: cluster.link(run.ranks[rank], other)
        for peer, other in enumerate(run.ranks)
        if peer != rank
    }
    world = dist.group.WORLD
    assert world is not None
    dicomm.distributed.set_links(
        world, {peer: (link.latency_s, link.bytes_per_s) for peer, link in links.items()}
    )


def _measure(
    rank: int, pair: tuple[int, int], device: Device, store: dist.Store, key: str, largest: int
) -> tuple[float, float]:
    """Returns the seconds of latency and of each byte, by one short and one long message."""
    small_s = _half_round_trip_s(rank, pair, SMALL_BYTES, SMALL_REPEATS, device)
    size, long_enough = min(1 << 20, largest), False
    while not long_enough:
        large_s = _half_round_trip_s(rank, pair, size, LARGE_REPEATS, device)
        if rank == pair[0]:  # both must agree
            done = large_s - small_s > LONG_S or 4 * size > largest
            store.set(f"{key}/{size}", "done" if done else "longer")
        long_enough = store.get(f"{key}/{size}") == b"done"
        size *= 4
    byte_s = max(large_s - small_s, 1e-12) / (size // 4 - SMALL_BYTES)
    return max(0.0, small_s - SMALL_BYTES * byte_s), byte_s


def _half_round_trip_s(
    rank: int, pair: tuple[int, int], size_bytes: int, repeats: int, device: Device
) -> float:
    message = torch.zeros(size_bytes // 4, device=device.device)
    trips = []
    for _ in range(repeats):
        begin = device.clock.mark()
        if rank == pair[0]:
            dist.send(message, pair[1])
            dist.recv(message, pair[1])
        else:
            dist.recv(message, pair[0])
            dist.send(message, pair[0])
        end = device.clock.mark()
        if device.device.type != "cpu":
            torch.accelerator.synchronize()
        trips.append(device.clock.seconds(end) - device.clock.seconds(begin))
    return min(trips) / 2


def _keep(path: Path, link: MeasuredLink) -> None:
    profile = read_profile(path)
    links = sorted((*profile.links, link), key=lambda each: each.pair)
    write_profile(replace(profile, links=tuple(links)), path)
