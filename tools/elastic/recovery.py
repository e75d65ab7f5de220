"""Recovery from the nearest copies, beside fetching all of the state from the remote store.

AutoHet's scenarios (section V-C), by heteropp.state.recovery on processes that hold GPT-3's layers
in small. The remote store passes 1,200 MB/s to all nodes together, a node's disk 3,500 MB/s, and
nodes reach each other at 400 Gb/s: all are slowed down alike, so that the state comes from the
remote store in the seconds that are asked for.

What is expected of a state of S bytes, by hand. All from the store takes S / 1200 MB/s at least:
our peer's ranks fetch each element once and pass it on to each other. AutoHet's peer, Varuna, has
each group download its own, which would take 2, 2 and 5 times as long. Ours:
A  n0 and n1 have a half each, which their disks read side by side: S/2 / 3500, 5.8 times faster.
B  n0's half comes from the store while n1's disk reads the other: S/2 / 1200, twice as fast; one
   after the other would be the paper's 1.49.
C  as A, and n2 and n3 get their halves over a link: S/2 / 3500 + S/2 / 50000, 5.4 times faster.
From host memory, which nothing slows down here, A and C are a matter of our own overhead alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from evidence import Row, row
from pipelines.ranks import Failed, Ranks
from rich.console import Console

from dicomm.bench.quiet import Quiet, Watch
from elastic.paced import Paced, write_link
from elastic.scenarios import (
    AFTER,
    BARS,
    BEFORE,
    RANKS_PER_NODE,
    STATE_BYTES,
    Training,
    real_state_bytes,
    scaled_model,
    training,
)
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.transport import Coordinates, Groups, connect
from heteropp.runtime.step.guard import Guard
from heteropp.runtime.step.update import Update
from heteropp.state.checkpoint.manifest import Manifest
from heteropp.state.recovery.recover import Recovered, recover
from heteropp.state.recovery.snapshots import Cadence, SnapshotWriter
from heteropp.state.recovery.tiers import Tiers
from heteropp.state.slices.state import State
from hyperhetero.progress import Progress

REMOTE, DISK, LINK = 1200e6, 3500e6, 50e9  # bytes per second; a link is shared by a node's ranks
LATENCY_S = 5e-6
DEADLINE_S = 100.0
OURS, FROM_MEMORY, PEER = "disk", "memory", "remote"  # the nearest tier that is there
TURNS = 3  # of every recovery, in turn; the median counts


Found = dict[str, list[list[tuple[float, Recovered]]]]  # by kind, turn and rank


class Member:
    """A process that is a rank of one training after another."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self.store = rank, store
        import dicomm.distributed  # noqa: F401  (registers the backend)

    def keep(self, number: int, what: Training, folder: Path) -> None:
        """Leaves a step in every tier."""
        if self.rank >= len(what.nodes):
            return
        control, state = self._begin(number, what, link_bytes_per_s=0)
        for held in state.held():
            for quantity, tensor in held.tensors.items():
                tensor.fill_(_mark(quantity, held.slice.name))
        tiers = _tiers(folder, what.nodes[self.rank], "file")
        cadence = Cadence(memory=1, disk=1, remote=1)
        writer = SnapshotWriter(tiers, cadence, 0, what.nodes, state, control, _fail)
        writer.keep(_manifest(what))
        writer.finish(DEADLINE_S)
        self._end(control)

    def recover(
        self, number: int, what: Training, folder: Path, nearest: str, link_bytes_per_s: float
    ) -> tuple[float, Recovered] | None:
        """Seconds until this rank had its state, which is checked."""
        if self.rank >= len(what.nodes):
            return None
        control, state = self._begin(number, what, link_bytes_per_s)
        tiers = _tiers(folder, what.nodes[self.rank], Paced.protocol, nearest)
        control.barrier("begin")
        begin_s = time.monotonic()
        found = recover(state, _manifest(what), tiers, what.nodes, control)
        seconds = time.monotonic() - begin_s
        for held in state.held():
            for quantity, tensor in held.tensors.items():
                if not (tensor == _mark(quantity, held.slice.name)).all():
                    raise Failed(f"{quantity} of {held.slice.name} is not as it was kept")
        self._end(control)
        assert found is not None
        return seconds, found

    def _begin(self, number: int, what: Training, link_bytes_per_s: float) -> tuple[Control, State]:
        import dicomm.distributed

        store, world_size = dist.PrefixStore(f"{number}", self.store), len(what.nodes)
        connect(store, self.rank, world_size, "dicomm", DEADLINE_S)
        node = what.nodes[self.rank]
        links = {
            peer: (LATENCY_S, link_bytes_per_s)
            for peer, other in enumerate(what.nodes)
            if other != node
        }
        dicomm.distributed.set_links(None, links)
        place = Coordinates.of(what.plan, self.rank)
        groups = Groups(place)
        (layers,) = place.layers
        device = torch.device("cpu")
        module = what.plan.model.build(layers, groups.tensor_parallel, device, torch.float32)
        settings = Hyperparameters()
        update = Update(what.plan, place, groups, [module], settings)
        return Control(store, self.rank, world_size, DEADLINE_S), State(update, Guard(settings))

    def _end(self, control: Control) -> None:
        control.barrier("end")
        dist.destroy_process_group()


def _fail(what: str) -> None:
    raise Failed(what)


def _mark(quantity: str, name: str) -> float:
    """What all elements of a parameter are."""
    return float(zlib.crc32(f"{quantity}/{name}".encode()) % 1000)


def _manifest(what: Training) -> Manifest:
    return Manifest(
        step=1,
        model=what.plan.model,
        global_batch=1,  # plans differ in it, for as many groups
        seed=0,
        tokens_sha256="",
        hyperparameters=Hyperparameters(),
    )


def _tiers(folder: Path, node: str, protocol: str, nearest: str = FROM_MEMORY) -> Tiers:
    return Tiers(
        job="elastic-bench",
        memory=folder / "memory" / node if nearest == FROM_MEMORY else None,
        disk=f"{protocol}://{folder / 'disk' / node}" if nearest != PEER else None,
        remote=f"{protocol}://{folder / 'remote'}",
    )


def recovery_rows(models: Sequence[str], peer_s: float) -> tuple[list[Row], Quiet]:
    """Measures the recovery of every model in every scenario. Raises Failed."""
    kinds = (FROM_MEMORY, OURS, PEER) * TURNS
    rows: list[Row] = []
    numbers = itertools.count()
    after = {name: training(scaled_model("3B"), groups) for name, groups in AFTER.items()}
    most = max(len(what.nodes) for what in after.values())
    console = Console(stderr=True)
    with (
        TemporaryDirectory() as root,
        Ranks(most, Member) as ranks,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("recovery", total=len(models) * (len(AFTER) * len(kinds) + 1))
        watch = Watch()
        for name in models:
            model = scaled_model(name)
            folder = Path(root, name)
            slow = _slow_down(folder, _state_bytes(model), peer_s)
            ranks.call("keep", next(numbers), training(model, BEFORE), folder)
            progress.advance(task)
            for scenario, groups in AFTER.items():
                found: Found = defaultdict(list)
                for kind in kinds:
                    call = partial(ranks.call, "recover", next(numbers), training(model, groups))
                    answers = call(folder, kind, slow * LINK / RANKS_PER_NODE)
                    found[kind].append([answer for answer in answers if answer])
                    watch.spin()
                    progress.advance(task)
                rows += _rows(f"{scenario}, {name}", BARS[scenario], found)
        return rows, watch.result()


def _state_bytes(model: Any) -> int:
    return STATE_BYTES * sum(
        torch.Size(parameter.shape).numel() for parameter in model.parameters()
    )


def _slow_down(folder: Path, state_bytes: int, peer_s: float) -> float:
    """Writes the stores' links; gives how much slower than in the field all of them are."""
    slow = state_bytes / peer_s / REMOTE
    write_link(folder / "remote", slow * REMOTE)
    for node in ("n0", "n1", "n2", "n3"):
        write_link(folder / "disk" / node, slow * DISK)
    return slow


def _rows(name: str, bar: float, found: Found) -> list[Row]:
    seconds = {
        kind: statistics.median(max(s for s, _ in answers) for answers in turns)
        for kind, turns in found.items()
    }
    ours, peer = seconds[OURS], seconds[PEER]
    account = found[OURS][0][0][1]
    remote_bytes = account.bytes_from("remote")
    return [
        row(f"{name}", "s", ours, peer=peer, peer_name="all from the remote store, once"),
        row(f"{name}: faster", "x", peer / ours, bar=bar, better="higher"),
        row(f"{name}: fetched from the remote store", "MB", remote_bytes / 1e6,
            peer=found[PEER][0][0][1].bytes_from("remote") / 1e6, peer_name="all of it"),
        row(f"{name}: from host memory", "s", seconds[FROM_MEMORY]),
    ]  # fmt: skip


def scale(name: str, peer_s: float) -> str:
    """Says how much state and how many seconds in the field the smaller ones here stand for."""
    state_bytes, real_bytes = _state_bytes(scaled_model(name)), real_state_bytes(name)
    real_s = real_bytes / REMOTE
    return (
        f"GPT-3 {name}: {real_bytes / 1e9:.0f} GB of state as {state_bytes / 1e6:.0f} MB, "
        f"{real_s:.0f} s from the remote store as {peer_s:g} s"
    )
