"""What would make a request possible that is not: the smallest changes to it that do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from heteropp.description.cluster import LARGEST
from heteropp.description.profile import ProfileError
from heteropp.search.planner import Request, Result, SearchError, planner
from heteropp.search.what_if import ClusterChange, changed

MOST_NODES = 64  # of a chip type, more or fewer
OFFLOADING = "--planner zorse"
CUTTING = "--context-parallel 8"
SPREADING = "--expert-parallel 8"
SPREADING_AS_AUTO = f"--planner auto {SPREADING}"
DIVIDING = ("auto", "exact")  # planners that cut sequences and spread experts


@dataclass(frozen=True)
class Remedy:
    """A changed request that has a plan; `what` says the change, as an order to a person."""

    what: str
    option: str  # of heteropp-search, with its value
    request: Request
    result: Result


def remedies(request: Request, name: str = "exact") -> Iterator[Remedy]:
    """Yields every kind of change that alone makes the request possible, as small as it can be.

    Changes that leave the training's result as it is come first: ZeRO, smaller micro-batches,
    unlike stages, cut sequences, experts over ranks, another schedule, offloading; then other
    global batches, then other node counts.
    """
    having = {OFFLOADING: "zorse", CUTTING: name, SPREADING: name, SPREADING_AS_AUTO: "auto"}
    usual = name
    if name == "auto":  # which has every freedom of these; the exact planner answers sooner
        usual, request = "exact", replace(request, uneven_layers=True, stage_degrees=True)
    for candidates in _changes(request, name):
        for what, option, wanted in candidates:
            search = planner(having.get(option, usual))
            try:
                yield Remedy(what, option, wanted, search(wanted))
                break
            except (SearchError, ProfileError):  # what was not measured is no remedy
                continue


Candidate = tuple[str, str, Request]  # what, option, request


def _changes(request: Request, name: str) -> Iterator[Iterator[Candidate]]:
    """Yields the kinds of change, each as candidates from the smallest on; name: the planner's."""
    yield _zero(request)
    yield _micro_batch(request)
    yield _freer(request)
    yield _parts(request, name)
    yield _experts(request, name)
    yield _schedule(request)
    yield _offloading(request, name)
    yield _global_batch(request)
    for chip in request.cluster.chip_names():
        yield _more_nodes(request, chip)
    for chip in request.cluster.chip_names():
        yield _fewer_nodes(request, chip)


def _zero(request: Request) -> Iterator[Candidate]:
    stages: tuple[Literal[1, 2], ...] = (1, 2)
    for stage in stages:
        if stage > request.zero_stage:
            changes = replace(request, zero_stage=stage)
            yield f"use ZeRO stage {stage}", f"--zero-stage {stage}", changes


def _micro_batch(request: Request) -> Iterator[Candidate]:
    for sequences in range(request.sequences - 1, 0, -1):
        if request.global_batch % sequences == 0:
            yield (
                f"take micro-batches of {sequences} {_sequences(sequences)} a replica",
                f"--micro-batch-per-replica {sequences}",
                replace(request, sequences=sequences),
            )


def _freer(request: Request) -> Iterator[Candidate]:
    if not request.uneven_layers:
        yield (
            "let stages of one chip type hold unlike numbers of layers",
            "--uneven-layers",
            replace(request, uneven_layers=True),
        )
    if not request.stage_degrees:
        yield (
            "let stages of one chip type have unlike degrees and layers",
            "--uneven-layers --stage-degrees",
            replace(request, uneven_layers=True, stage_degrees=True),
        )


def _parts(request: Request, name: str) -> Iterator[Candidate]:
    """Only where the planner was not let do it, as it is tried otherwise."""
    if request.model.context_parallel_problem() is None and _was_kept(
        name, request.context_parallel
    ):
        yield "cut sequences over up to 8 ranks", CUTTING, replace(request, context_parallel=8)


def _experts(request: Request, name: str) -> Iterator[Candidate]:
    """Only where the planner was not let do it, or has no such plans: or else it was tried."""
    if request.model.expert_parallel_problem() is not None:
        return
    changes, what = replace(request, expert_parallel=8), "let experts lie over up to 8 ranks"
    if name not in DIVIDING:
        yield f"{what}, as planner auto does", SPREADING_AS_AUTO, changes
    elif _was_kept(name, request.expert_parallel):
        yield what, SPREADING, changes


def _was_kept(name: str, most: int | None) -> bool:
    """Whether a planner that may divide a stage over so many ranks was kept from it."""
    return most == 1 or (most is None and name == "exact")


def _schedule(request: Request) -> Iterator[Candidate]:
    if request.schedule != "1f1b":
        changes = replace(request, schedule="1f1b")
        yield "use schedule 1f1b, which holds least", "--schedule 1f1b", changes


def _offloading(request: Request, name: str) -> Iterator[Candidate]:
    what = "offload to host memory, as planner zorse does"
    given = {"--uneven-layers": request.uneven_layers, "--stage-degrees": request.stage_degrees}
    if name == "exact" and (own := [option for option, is_given in given.items() if is_given]):
        what += f" and without {' and '.join(own)}"
    yield what, OFFLOADING, request
    cluster = request.cluster
    if any(node.host_memory_bytes is not None for node in cluster.nodes):
        nodes = tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes)
        larger = replace(request, cluster=replace(cluster, nodes=nodes))
        yield f"{what}, and give it more host_memory_bytes in the cluster file", OFFLOADING, larger


def _global_batch(request: Request) -> Iterator[Candidate]:
    """Powers of two near the one wanted, smaller ones first."""
    batch = 1 << (request.global_batch.bit_length() - 1)
    smaller = batch if batch < request.global_batch else batch // 2
    larger = batch * 2
    for near in (smaller, larger, smaller // 2, larger * 2, smaller // 4, larger * 4):
        if near >= request.sequences and near % request.sequences == 0:
            yield (
                f"train with a global batch of {near} {_sequences(near)}",
                f"--global-batch {near}",
                replace(request, global_batch=near),
            )


def _more_nodes(request: Request, chip: str) -> Iterator[Candidate]:
    """Doubled steps of nodes: 1, 2, 4, ... more."""
    size = max(len(node.ranks) for node in request.cluster.nodes if node.chip_name == chip)
    nodes = 1
    while nodes <= MOST_NODES and request.cluster.world_size + nodes * size <= LARGEST:
        change = ClusterChange(nodes, chip)
        more = changed(request.cluster, [change])
        plural = "node" if nodes == 1 else "nodes"
        yield (
            f"add {nodes} {plural} of chip {chip}",
            f'--what-if "{change}"',
            replace(request, cluster=more),
        )
        nodes *= 2


def _fewer_nodes(request: Request, chip: str) -> Iterator[Candidate]:
    nodes = sum(node.chip_name == chip for node in request.cluster.nodes)
    for out in range(1, min(nodes, MOST_NODES)):
        change = ClusterChange(-out, chip)
        yield (
            f"leave out {out} {'node' if out == 1 else 'nodes'} of chip {chip}",
            f'--what-if "{change}"',
            replace(request, cluster=changed(request.cluster, [change])),
        )


def _sequences(count: int) -> str:
    return "sequence" if count == 1 else "sequences"
