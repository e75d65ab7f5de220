"""Who is on a rank's machine, and what the ranks, their machines and the job's store are called.

Every rank says where it runs, rank 0 reads that of all, and answers machine by machine. So a rank
asks the store for what is about its own machine, and not for as much as there are ranks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from heteropp.description.files import FileError
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import Seals, UntrueError
from heteropp.runtime.ranks.processes import Process
from heteropp.runtime.ranks.secret import unlike_secrets

HEAR_S = 1.0  # for the others to hear why rank 0 ends, before its launcher ends, and the store


@dataclass
class Surroundings:
    rank: int
    labels: Sequence[str]  # by rank
    local: dict[int, Process]  # ranks of this machine, in order, this one among them
    is_one_machine: bool  # that all ranks are on
    hosts: dict[int, str]  # of the ranks that this one knows: rank 0 all, others their machine's
    store_host: str  # the store's machine, if a rank is on it
    store_ranks: list[int]  # on it
    nodes: list[int]  # the lowest rank of each machine, in order
    entries: Seals  # of the store's part where every rank has said where it runs

    @property
    def own(self) -> Process:
        return self.local[self.rank]

    @property
    def node(self) -> int:
        """The lowest rank of this machine."""
        return min(self.local)

    def name(self, rank: int) -> str:
        """Returns a rank's name, with its machine where there are several."""
        if self.is_one_machine:
            return self.labels[rank]
        with contextlib.suppress(RuntimeError):  # of the store
            if rank not in self.hosts and (said := self.entries.get(f"process/{rank}")):
                self.hosts[rank] = Process(*json.loads(said)).host
        host = self.hosts.get(rank)
        return f"{self.labels[rank]} on {host}" if host else self.labels[rank]

    def store_name(self) -> str:
        """Returns the name of the holder of the job's store: the launcher or another machine."""
        if self.own.has_store:
            return "the launcher"
        if not self.store_ranks:
            return "the machine of the job's store"
        ranks = ", ".join(self.labels[rank] for rank in self.store_ranks)
        return f"{self.store_host}, the machine of {ranks} and of the job's store,"


def meet(control: Control, own: Process, labels: Sequence[str], entries: Seals) -> Surroundings:
    """Finds the ranks of this machine; every rank calls it, and then `meet_nodes`.

    entries: reads the control's texts over a connection of its own. Raises FileError where a rank
    has another secret.
    """
    control.publish("process", json.dumps(own))
    if control.rank == 0:
        hosts = _tell_machines(control, labels)
    else:
        _know_rank_0(control, own, labels)
        hosts = {}
    told = json.loads(control.hear(f"machine {own.machine}"))
    if told["unlike"]:
        raise FileError(told["unlike"])
    there = {int(rank): Process(*words) for rank, words in told["ranks"].items()}
    local = {
        rank: process
        for rank, process in there.items()
        if rank == control.rank or process.shares_machine(own)
    }
    return Surroundings(
        rank=control.rank,
        labels=labels,
        local=local,
        is_one_machine=told["is one machine"],
        hosts=hosts or {rank: process.host for rank, process in local.items()},
        store_host=told["store host"],
        store_ranks=told["store ranks"],
        nodes=[],
        entries=entries,
    )


def meet_nodes(control: Control, surroundings: Surroundings) -> None:
    """Finds the lowest rank of each machine, once each knows its own."""

    def lowest(texts: Sequence[str]) -> str:
        return json.dumps(sorted(set(map(int, texts))))

    control.publish("node", str(surroundings.node))
    surroundings.nodes = json.loads(control.answered("node", lowest))


def _tell_machines(control: Control, labels: Sequence[str]) -> dict[int, str]:
    """Answers every machine; returns the ranks' hosts. Raises FileError, once all have heard it."""
    try:
        texts, unlike = control.collect("process"), ""
    except UntrueError as error:
        texts = [found.text for found in error.found]
        are_own = [found.is_true for found in error.found]
        unlike = unlike_secrets(_names(labels, _readable(texts)), are_own) or str(error)
    processes = _readable(texts)
    stored = [rank for rank, process in processes.items() if process.has_store]
    common = {
        "unlike": unlike,
        "is one machine": _are_one_machine(processes),
        "store host": processes[stored[0]].host if stored else "",
        "store ranks": stored,
    }
    machines: dict[str, dict[int, Process]] = defaultdict(dict)
    for rank, process in processes.items():
        machines[process.machine][rank] = process
    control.announce_all(
        {
            f"machine {machine}": json.dumps({**common, "ranks": there})
            for machine, there in machines.items()
        }
    )
    if unlike:
        time.sleep(HEAR_S)
        raise FileError(unlike)
    return {rank: process.host for rank, process in processes.items()}


def _know_rank_0(control: Control, own: Process, labels: Sequence[str]) -> None:
    """Raises FileError where rank 0, which answers all others, has another secret than this one."""
    try:
        control.hear("process/0")
    except UntrueError as error:
        there = _readable([error.found[0].text]) | {control.rank: own}
        names = _names(labels, there)
        pair = [names[0], names[control.rank]]
        raise FileError(unlike_secrets(pair, [False, True]) or str(error)) from None


def _readable(texts: Sequence[str]) -> dict[int, Process]:
    """Returns the processes that ranks told of; a stranger may have written what no rank says."""
    found = {}
    for rank, text in enumerate(texts):
        with contextlib.suppress(ValueError, TypeError):
            found[rank] = Process(*json.loads(text))
    return found


def _are_one_machine(processes: dict[int, Process]) -> bool:
    return len({(process.machine, process.host) for process in processes.values()}) == 1


def _names(labels: Sequence[str], processes: dict[int, Process]) -> list[str]:
    if _are_one_machine(processes):
        return list(labels)
    return [
        f"{label} on {processes[rank].host}" if rank in processes else label
        for rank, label in enumerate(labels)
    ]
