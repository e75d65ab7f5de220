"""Ranks whose state is known element by element, to keep copies of it and to recover it."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forkserver
import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan, validate
from heteropp.layout.boxes import Box
from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.transport import Coordinates, Groups, connect
from heteropp.runtime.stage_modules import stage_modules
from heteropp.runtime.step.guard import Guard
from heteropp.runtime.step.update import Update
from heteropp.state.checkpoint.manifest import Manifest
from heteropp.state.recovery.recover import Recovered, recover
from heteropp.state.recovery.snapshots import Cadence, SnapshotWriter
from heteropp.state.recovery.tiers import Tiers
from heteropp.state.slices.quantities import StoredName
from heteropp.state.slices.state import State

DEADLINE_S = 120
JOB = "job-1"


def truth(quantity: StoredName, name: str, shape: Sequence[int], step: int) -> Tensor:
    """What a whole parameter, or its optimizer's state, is at a step."""
    seed = zlib.crc32(f"{quantity}/{name}/{step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def manifest_of(plan: Plan, step: int) -> Manifest:
    return Manifest(
        step=step,
        model=plan.model,
        global_batch=1,  # plans of tests differ in it
        seed=0,
        tokens_sha256="",
        hyperparameters=Hyperparameters(),
    )


@dataclass
class Here:
    """A rank of a plan, in its process."""

    plan: Plan
    control: Control
    nodes: Sequence[str]
    root: Path

    def __post_init__(self) -> None:
        place = Coordinates.of(self.plan, self.control.rank)
        groups = Groups(place)
        modules = stage_modules(self.plan, place, groups, torch.device("cpu"), seed=0)
        settings = Hyperparameters()
        self.update = Update(self.plan, place, groups, modules, settings)
        self.state = State(self.update, Guard(settings))
        self.shapes = {
            self.plan.model.global_name(p.name): p.shape for p in self.plan.model.parameters()
        }

    @property
    def rank(self) -> int:
        return self.control.rank

    def tiers(self, memory: bool = True, disk: bool = True, remote: str | None = None) -> Tiers:
        return tiers_of(self.root, self.nodes[self.rank], memory, disk, remote)

    def fill(self, step: int) -> None:
        """All that this rank holds is what it is at a step."""
        for flat in self.update.flats:
            for entry in (*flat.entries, *flat.layout.frozen):
                whole = self._truth("value", entry.global_name, entry.box, step)
                flat.values[entry.first : entry.last].copy_(whole.reshape(-1))
            if flat.mixed:
                flat.master.copy_(flat.values[flat.shard])
        for held in self.state.held():
            for quantity, tensor in held.tensors.items():
                tensor.copy_(self._truth(quantity, held.slice.name, held.slice.box, step))

    def wrong(self, step: int) -> list[str]:
        """What is not bit for bit as at a step."""
        found = []
        for flat in self.update.flats:
            for entry in (*flat.entries, *flat.layout.frozen):
                whole = self._truth("value", entry.global_name, entry.box, step)
                own = flat.values[entry.first : entry.last].view(entry.box.shape)
                if not torch.equal(own, whole.to(own.dtype)):
                    found.append(f"rank {self.rank}: {entry.global_name}")
        for held in self.state.held():
            for quantity, tensor in held.tensors.items():
                whole = self._truth(quantity, held.slice.name, held.slice.box, step)
                if not torch.equal(tensor, whole.to(tensor.dtype)):
                    found.append(f"rank {self.rank}: {quantity} of {held.slice.name}")
        return found

    def _truth(self, quantity: StoredName, name: str, box: Box, step: int) -> Tensor:
        shape = self.shapes[name]
        whole = Box(tuple((0, size) for size in shape))
        return truth(quantity, name, shape, step)[box.within(whole)]


def tiers_of(
    root: Path, node: str, memory: bool = True, disk: bool = True, remote: str | None = None
) -> Tiers:
    return Tiers(
        job=JOB,
        memory=root / "memory" / node if memory else None,
        disk=root / "disk" / node if disk else None,
        remote=remote,
    )


def keep(
    here: Here,
    steps: Sequence[int],
    cadence: Cadence,
    generation: int = 0,
    remote: str | None = None,
    disk: str | None = None,
) -> list[str]:
    """Keeps steps; gives what was warned of."""
    warnings: list[str] = []
    tiers = here.tiers(remote=remote)
    if disk:
        tiers = Tiers(job=tiers.job, memory=tiers.memory, disk=disk, remote=remote)
    writer = SnapshotWriter(
        tiers, cadence, generation, here.nodes, here.state, here.control, warnings.append
    )
    for step in steps:
        here.fill(step)
        writer.keep(manifest_of(here.plan, step))
        writer.finish(DEADLINE_S)
        dist.barrier()  # as every step of a training is
    here.control.barrier("kept by all")
    return warnings


def recovered(
    here: Here, remote: str | None = None, reported: int | None = None, saved: int = 0
) -> tuple[Recovered | None, list[str]]:
    """What was recovered, and what of it is wrong."""
    found = recover(
        here.state,
        manifest_of(here.plan, 0),
        here.tiers(remote=remote),
        here.nodes,
        here.control,
        reported,
        saved,
    )
    return found, here.wrong(found.step) if found else []


class Ranks:
    """Processes, forked once, that are the ranks of one plan after another, over gloo."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.jobs = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(
        self, plan: Plan, nodes: Sequence[str], act: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """What `act(here, *arguments)` gives on each rank; an exception is given as its text."""
        validate(plan)
        assert len(nodes) == plan.world_size
        while len(self.pipes) < plan.world_size:
            self._start()
        self.jobs += 1
        used = self.pipes[: plan.world_size]
        for rank, pipe in enumerate(used):
            pipe.send((self.jobs, self.root, plan, list(nodes), rank, act, arguments))
        answers = []
        for rank, pipe in enumerate(used):
            assert pipe.poll(DEADLINE_S), f"rank {rank} is not done after {DEADLINE_S} s"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _start(self) -> None:
        context = forkserver.context()
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.store.port), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)


def _serve(pipe: Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            number, root, plan, nodes, rank, act, arguments = pipe.recv()
        except EOFError:  # pytest is gone
            return
        job = dist.PrefixStore(f"job {number}", store)
        connect(job, rank, plan.world_size, "gloo", timeout_s=DEADLINE_S)
        try:
            control = Control(job, rank, plan.world_size, DEADLINE_S)
            pipe.send(act(Here(plan, control, nodes, root), *arguments))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        dist.destroy_process_group()
        gc.collect()


class Counted(LocalFileSystem):
    """A remote store that notes every tensor's bytes that are fetched from it."""

    protocol = "counted"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        content = super().cat_file(path, start, end, **kwargs)
        if path.endswith(".safetensors"):
            folder = Path(path).parents[1]
            with open(folder / "fetched", "a") as log:
                log.write(f"{len(content)}\n")
        return content

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("counted://"))


class Full(LocalFileSystem):
    """A disk that has room for manifests and small files alone."""

    protocol = "full"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if len(value) > 10_000:
            raise OSError(28, os.strerror(28), path)
        super().pipe_file(path, value, mode, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("full://"))


class Hanging(LocalFileSystem):
    """A store that neither writes nor lists anything until it is told to go on."""

    protocol = "hanging"
    goes_on = threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        assert self.goes_on.wait(DEADLINE_S)
        super().pipe_file(path, value, mode, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("hanging://"))

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        assert self.goes_on.wait(DEADLINE_S)
        return super().ls(path, detail, **kwargs)


for each in (Counted, Full, Hanging):
    fsspec.register_implementation(each.protocol, each, clobber=True)


def fetched_bytes(store: Path) -> int:
    """What was fetched of a counted store."""
    log = store / "fetched"
    return sum(map(int, log.read_text().split())) if log.exists() else 0
