"""What an elastic job's processes say to each other through the launcher's store.

A *member* is a process that has one chip and its name: "a-0/1" is chip 1 of node "a-0". A
*generation* is a period with one plan on one set of members. What follows is under these keys:

    generation/N      Generation, by the leader
    newest            number of the newest generation: agents start its joiners
    ready/N/MEMBER    "": a member that was started for a switch has its chip open, and waits
    next/N            number of the generation that N is to switch to, by the leader
    switch-at/N       step at whose end all of N do so, by rank 0 of N
    switched/N        Account of the switch that began N, by its rank 0, before its first step
    reading/N         "": rank 0 of N has its chip open, and begins to read the snapshots
    recovered/N       likewise, of every other start: also of an initial one
    progress/N        Progress of the newest step, by rank 0 of N
    notice/N/MEMBER   "": a member that was started for N was told by SIGTERM that its chip will go,
                      by itself
    failed/N/MEMBER   Failure that a member that was started for N ends with, by itself or its agent
    summary           Summary of the run as JSON, by rank 0 of the last generation
    stop              "": the step is to be finished and saved, by the leader
    end/N/MEMBER      "": a member that was started for N is to be killed, by the leader
    ended/N/MEMBER    Ended, of a member that was started for N, by its agent
    beat/NODE         number that grows while the node's agent is alive, and renews the lease of its
                      members (heteropp.elastic.lease)
    over              exit code of the job, by the leader: agents end

The stores of torch.distributed's own groups are under "generation N", and under "switch N" for the
world that N begins with. MEMBER has a slash in it, which no other part of a key has.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from heteropp.description.cluster import read_cluster
from heteropp.description.plan import read_plan
from heteropp.process_groups.seals import Seals, StorePart
from heteropp.runtime.ranks.store import limit_answers
from heteropp.runtime.training_run import RankChip, TrainingRun
from heteropp.state.recovery.tiers import Tiers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the job's store is."""

    host: str
    port: int
    answer_s: float  # that it has to answer in; DistNetworkError after it
    prefix: str = ""  # of this start of the job, where the store outlives it

    def connect(self, timeout_s: float) -> dist.Store:
        """Connects this process to the store; it waits at most `timeout_s` for other members."""
        store = dist.TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        limit_answers(store, self.answer_s)
        return StorePart(self.prefix, store) if self.prefix else store


@dataclass(frozen=True, kw_only=True)
class Job:
    """What does not change from one generation to the next."""

    name: str  # that no other job has; whatever goes on with --resume keeps it
    run: TrainingRun  # its plan, cluster and chips are those that the job begins with
    meeting: Meeting
    memory: Path  # snapshots of the state in host memory: a folder of this job's own
    disk: Path  # on the nodes' disks: a folder that other jobs may use as well
    remote: str | None  # in a store that all reach, an fsspec URL, likewise
    keep_memory_every: int = 1  # steps
    keep_disk_every: int = 10  # steps
    keep_remote_every: int = 0  # steps; 0: never

    def run_of(self, generation: Generation) -> TrainingRun:
        """Returns the run with a generation's plan, cluster and chips. Raises FileError."""
        cluster = read_cluster(generation.cluster)
        chips = tuple(
            RankChip(str(cluster.chip(rank).path), cluster.chip(rank).chip_type)
            for rank in range(cluster.world_size)
        )
        return replace(
            self.run,
            plan=read_plan(generation.plan),
            cluster=generation.cluster if self.run.device == "chip" else None,
            chips=chips,
        )

    def memory_of(self, node: str) -> Path:
        return self.memory / node

    def disk_of(self, node: str) -> Path:
        return self.disk / self.name / node

    def tiers_of(self, node: str) -> Tiers:
        """Returns where a node keeps snapshots, in folders that no other job shares."""
        remote = f"{self.remote.removesuffix('/')}/{self.name}" if self.remote else None
        return Tiers(
            job=self.name, memory=self.memory_of(node), disk=self.disk_of(node), remote=remote
        )


@dataclass(frozen=True, kw_only=True)
class Generation:
    number: int
    folder: Path
    members: tuple[str, ...]  # by rank
    joiners: tuple[str, ...]  # of them, who are started for it; the others' processes go on
    # from initial values (or whatever TrainingRun says); from the generation before, whose
    # processes go on; or from snapshots of the state
    start: Literal["initial", "switch", "recover"]
    before: int | None = None  # for a switch: the generation that goes on
    leavers: tuple[str, ...] = ()  # for a switch: members of that one who end with it
    cause: str = ""  # what made it necessary, a sentence

    @property
    def cluster(self) -> Path:
        return self.folder / "cluster.toml"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"


class Board:
    """Reads and writes the job's store: values by the parts of a key."""

    def __init__(self, store: dist.Store) -> None:
        self.store = StorePart("elastic", store)
        self.seals = Seals(self.store)

    def say(self, value: Any, *key: str | int) -> None:
        """`value`: a Generation, one of heteropp.elastic.messages, a text or a number."""
        self.seals.set(_name(key), TypeAdapter(type(value)).dump_json(value).decode())

    def heard(self, type_: type[T], *key: str | int) -> T | None:
        """What was said by now, if anything was."""
        text = self.seals.get(_name(key))
        return None if text is None else TypeAdapter(type_).validate_json(text)

    def found(self, type_: type[T], *key: str | int) -> tuple[T, bool] | None:
        """What anybody has said by now, and whether it was a process of this job."""
        found = self.seals.find(_name(key))
        with suppress(ValidationError):  # it was not
            return found and (TypeAdapter(type_).validate_json(found.text), found.is_true)
        return None

    def hear(self, type_: type[T], *key: str | int, timeout_s: float | None = None) -> T:
        """Waits for what is said; DistStoreError when it is not in time (the store's own)."""
        if timeout_s is not None:
            self.store.wait([_name(key)], timedelta(seconds=timeout_s))
        return TypeAdapter(type_).validate_json(self.seals.wait([_name(key)])[0])

    def take(self, type_: type[T], *key: str | int) -> T | None:
        """Returns what was said by now, if anything was, and removes it to be said anew."""
        if (value := self.heard(type_, *key)) is not None:
            self.store.delete_key(_name(key))
        return value


def _name(key: tuple[str | int, ...]) -> str:
    return "/".join(map(str, key))


def generation_store(store: dist.Store, number: int) -> dist.Store:
    """Returns the part of the store for a generation's process groups, control and watch."""
    return StorePart(f"generation {number}", store)


def switch_store(store: dist.Store, number: int) -> dist.Store:
    """Returns the part of the store for the world in which the switch to a generation happens."""
    return StorePart(f"switch {number}", store)
