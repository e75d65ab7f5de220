"""Who takes part: dicomm by each of its APIs, and the peers that are installed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dicomm.bench import cpp, mpi, perftest, ucx
from dicomm.bench.options import BadOption
from dicomm.bench.ranks import Setup
from dicomm.bench.rounds import Contestant, Entry
from dicomm.bench.team import Team

Candidate = tuple[str, Callable[[], Contestant], str | None]  # name, start, why it is absent

TRANSPORTS = ("shm", "tcp", "verbs")
APIS = ("c++", "python", "torch")
PEERS = ("gloo", "mpi", "ucx", "perftest", "none")
GLOO = "Gloo"
API_NAMES = {"c++": "C++", "python": "Python", "torch": "torch"}


@dataclass
class Field:
    """entries: who can be started. absent: who cannot, and why. peers: by transport, the names
    that dicomm's are held against over it; Gloo is one of each."""

    entries: list[Entry] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    peers: dict[str, list[str]] = field(default_factory=dict)

    def add(self, entry: Entry, why_absent: str | None) -> None:
        if why_absent:
            self.absent[entry[0]] = why_absent
        else:
            self.entries.append(entry)


def ours(transport: str, api: str) -> str:
    return f"dicomm {API_NAMES[api]} {transport}"


def default_transports() -> list[str]:
    return [t for t in TRANSPORTS if t != "verbs" or perftest.rdma_devices()]


def choose_nics(transports: Sequence[str], given: list[str] | None) -> tuple[str, ...]:
    """A device for each of two ranks: two different ones, if there are, so that a wire is used."""
    devices = perftest.rdma_devices()
    if "verbs" not in transports:
        return ()
    if not devices:
        raise BadOption("--transports: verbs needs an RDMA device, and there is none here")
    for nic in given or []:
        if nic not in devices:
            raise BadOption(f"--nics: '{nic}' is not one of {', '.join(devices)}")
    return tuple(given) if given else (devices[0], devices[1 % len(devices)])


def pairs(
    transports: Sequence[str],
    apis: Sequence[str],
    peers: Sequence[str],
    nics: tuple[str, ...],
    folder: str,
) -> Field:
    """Everyone for measurements between two ranks."""
    found = Field()
    secret = secrets.token_hex(16)
    for transport in transports:
        found.peers[transport] = []
        used = nics if transport == "verbs" else ()
        for api in apis:
            name = ours(transport, api)
            place = f"{folder}/{api}-{transport}"
            if api == "c++":
                program = partial(cpp.CppApi, name, transport, place, secret, used)
                found.add((name, program), cpp.why_absent(cpp.PERF))
            else:
                setup = Setup(api, "dicomm", transport, 2, place, secret, used)
                # Where torch is not needed, it is not waited for either.
                start = "spawn" if api == "python" else "forkserver"
                found.add((name, partial(Team, name, setup, start)), None)
        for peer, opening, why_absent in _peers(transport, peers, used, folder):
            found.add((peer, opening), why_absent)
            found.peers[transport].append(peer)
    if "gloo" in peers:
        found.add(_gloo(2, folder), None)
        for names in found.peers.values():
            names.insert(0, GLOO)
    return found


def teams(world_size: int, transport: str, peers: Sequence[str], folder: str) -> Field:
    """Returns all contestants of the collectives."""
    found = Field(peers={transport: []})
    name = ours(transport, "c++")
    program = partial(cpp.CppCollectives, name, transport, world_size)
    found.add((name, program), cpp.why_absent(cpp.COLLECTIVES))
    name = ours(transport, "torch")
    place = f"{folder}/torch-{transport}-{world_size}"
    setup = Setup("torch", "dicomm", transport, world_size, place, secrets.token_hex(16))
    found.add((name, partial(Team, name, setup)), None)
    if "gloo" in peers:
        found.add(_gloo(world_size, folder), None)
        found.peers[transport].append(GLOO)
    if "mpi" in peers and transport in mpi.LAYERS[mpi.OWN]:
        name = f"MPI {transport}"
        found.add((name, partial(mpi.Mpi, name, transport, world_size, folder)), mpi.why_absent())
        found.peers[transport].append(name)
    return found


def _gloo(world_size: int, folder: str) -> Entry:
    setup = Setup("torch", "gloo", "tcp", world_size, f"{folder}/gloo-{world_size}", "")
    return GLOO, partial(Team, GLOO, setup)


def _peers(
    transport: str, peers: Sequence[str], nics: tuple[str, ...], folder: str
) -> list[Candidate]:
    rows: list[Candidate] = []
    if "mpi" in peers and transport in mpi.LAYERS[mpi.OWN]:
        name = f"MPI {transport}"
        rows.append((name, partial(mpi.Mpi, name, transport, 2, folder), mpi.why_absent()))
    if "ucx" in peers:
        name = f"UCX {transport}"
        rows.append((name, partial(ucx.Ucx, name, transport, nics), ucx.why_absent()))
    if "ucx" in peers and transport in mpi.LAYERS[mpi.UCX]:
        name = f"MPI over UCX {transport}"
        program = partial(mpi.Mpi, name, transport, 2, folder, mpi.UCX)
        rows.append((name, program, mpi.why_no_ucx()))
    if "perftest" in peers and transport == "verbs":
        for verb in perftest.VERBS:
            name = f"perftest {verb}"
            start = partial(perftest.Perftest, name, verb, nics)
            rows.append((name, start, perftest.why_absent()))
    return rows
