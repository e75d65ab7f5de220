"""The improved-Metis paper's Table 1: its four instances, searched in every way we have.

The profiles are our cost model's, in the form of Metis's files; or, from a checkout of the public
tool or of the authors' fork, what its profile_data_samples tell of an A100, made up as the fork
does: more layers as the second, larger batches in proportion, a V100's times 3.5 times an A100's.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from heteropp.description.cluster import read_cluster
from heteropp.description.files import FileError
from heteropp.description.model import read_model
from heteropp.search import metis, metis_exact, metis_oom
from heteropp.search.metis_files import LayerProfile, MetisNode, Profiles, read_kinds, read_profiles
from heteropp.search.metis_problem import MEMORY_COEFFICIENT, Problem
from heteropp.search.metis_request import problem_of
from heteropp.search.metis_walk import Priority, Walk
from heteropp.search.planner import Request

GLOBAL_BATCH = 128  # sequences; the fork's README
NODE = 4  # chips
DEGREES = (1, 2, 4)  # of tensor parallelism
V100_TIMES = 3.5  # an A100's
ACTIVATION_BYTES = 1024 * 4096 * 2  # of a sequence: the tool's GPT, 2 bytes an element


@dataclass(frozen=True)
class Searched:
    steps: int  # of metis and metis-oom as published; of exact, dynamic programmes
    seconds: float  # with the making of the profiles and tables
    cost_s: float  # infinite: no plan was found
    lower_bound_s: float = 0.0  # proven; 0: nothing is
    complete: bool = True  # False: the time limit came first


@dataclass(frozen=True)
class Shape:
    """An instance of Table 1, and what it says of metis and metis-oom."""

    layers: int
    chips: int  # A100, and as many V100
    published: dict[str, Searched]


def _shape(layers: int, chips: int, metis_row: Searched, oom_row: Searched) -> Shape:
    return Shape(layers, chips, {"metis": metis_row, "metis-oom": oom_row})


SHAPES = (
    _shape(10, 16, Searched(612, 0.09534, 1.89837), Searched(562, 0.08734, 1.79360)),
    _shape(20, 32, Searched(58078, 17.1194, 2.07856), Searched(41208, 8.49832, 2.00578)),
    _shape(20, 64, Searched(3734, 0.85718, 1.10165), Searched(3482, 0.51160, 1.09834)),
    _shape(40, 128, Searched(1714619, 756.97088, 1.15472), Searched(1553492, 407.86006, 1.12022)),
)


def table(
    limit_s: float, metis_data: Path | None = None, shapes: tuple[Shape, ...] = SHAPES
) -> Iterator[tuple[Shape, dict[str, Searched]]]:
    """Each shape, and what metis, metis-oom and exact find.

    metis and metis-oom stop after `limit_s` seconds each. Raises FileError.
    """
    for shape in shapes:
        problem(shape, metis_data)  # traces the model, if that was never done on this machine
        yield (
            shape,
            {
                "metis": _walked(shape, metis_data, metis.priority, limit_s),
                "metis-oom": _walked(shape, metis_data, metis_oom.priority, limit_s),
                "exact": _proven(shape, metis_data),
            },
        )


def problem(shape: Shape, metis_data: Path | None = None) -> Problem:
    """The instance. Raises FileError."""
    if metis_data is not None:
        return _from_checkout(shape, metis_data)
    request = Request(
        cluster=read_cluster(f"metis-{shape.chips}-{shape.chips}"),
        model=read_model(f"metis-gpt2-{shape.layers}"),
        global_batch=GLOBAL_BATCH,
        zero_stage=0,
    )
    made = problem_of(request)
    profiles = made.profiles
    by_type = {
        chip: {key: _as_in_files(profile) for key, profile in table.items()}
        for chip, table in profiles.by_type.items()
    }
    return replace(
        made,
        profiles=replace(profiles, by_type=by_type),
        degrees=DEGREES,
        memory_coefficient=MEMORY_COEFFICIENT,
        pooled=True,
        permute_length=GLOBAL_BATCH,
    )


def _walked(shape: Shape, metis_data: Path | None, priority: Priority, limit_s: float) -> Searched:
    start = time.perf_counter()
    walk = Walk(problem(shape, metis_data), priority)
    walk.run(keep=1, limit_s=limit_s)
    seconds = time.perf_counter() - start
    cost_s = walk.best[0][0] if walk.best else math.inf
    return Searched(walk.steps, seconds, cost_s, complete=walk.complete)


def _proven(shape: Shape, metis_data: Path | None) -> Searched:
    start = time.perf_counter()
    found = metis_exact.solve(problem(shape, metis_data))
    seconds = time.perf_counter() - start
    return Searched(found.steps, seconds, found.cost_s, found.lower_bound_s)


def _as_in_files(profile: LayerProfile) -> LayerProfile:
    """Returns the profile as Metis's files have it: one memory figure a layer, one micro-batch."""
    nothing = (0.0,) * len(profile.seconds)
    memory = map(operator.add, profile.memory_bytes, profile.kept_bytes)
    return replace(
        profile,
        memory_bytes=tuple(map(operator.add, memory, profile.divided_bytes)),
        divided_bytes=nothing,
        kept_bytes=nothing,
        stage_bytes=0.0,
    )


def _from_checkout(shape: Shape, folder: Path) -> Problem:
    samples = folder / "profile_data_samples"
    profiles = read_profiles(samples, shape.layers)
    if "A100" not in profiles.by_type:
        raise FileError(f"folder {samples} has no profile of an A100, which Table 1 is made from")
    a100 = _larger_batches(profiles.by_type["A100"])
    v100 = {key: _slower(profile, V100_TIMES) for key, profile in a100.items()}
    update_s = profiles.update_s["A100"]
    return Problem(
        nodes=tuple(_nodes(shape, folder)),
        profiles=Profiles(
            layers=profiles.layers,
            parameter_bytes=profiles.parameter_bytes,
            update_s={"A100": update_s, "V100": V100_TIMES * update_s},
            batch_s=V100_TIMES * profiles.batch_s,
            by_type={"A100": a100, "V100": v100},
        ),
        global_batch=GLOBAL_BATCH,
        activation_bytes=ACTIVATION_BYTES,
        degrees=DEGREES,
        largest_batch=GLOBAL_BATCH,
        permute_length=GLOBAL_BATCH,
    )


def _nodes(shape: Shape, folder: Path) -> Iterator[MetisNode]:
    """Yields the nodes that the checkout's clusterfile.json describes.

    The public tool has no such file; our preset's nodes take its place.
    """
    path = folder / "clusterfile.json"
    if path.exists():
        kinds = {node.chip: node for _, node in sorted(read_kinds(path).items())}
    else:
        preset = problem(shape).nodes
        kinds = {node.chip.upper(): replace(node, chip=node.chip.upper()) for node in preset}
    for chip in ("A100", "V100"):
        if chip not in kinds:
            raise FileError(f"{path} has no node of instance_type {chip}")
        for _ in range(shape.chips // NODE):
            yield replace(kinds[chip], chips=NODE)


Table = dict[tuple[int, int], LayerProfile]  # by tp and batch


def _larger_batches(table: Table) -> Table:
    """Returns the table with batches beyond those profiled, up to the global batch.

    Times grow in proportion to the batch, and memory stays as profiled.
    """
    result = dict(table)
    for tp, batch in sorted(table):
        if (tp, 2 * batch) in table:
            continue
        factor = 2
        while batch * factor <= GLOBAL_BATCH:
            result[tp, batch * factor] = _slower(table[tp, batch], factor)
            factor *= 2
    return result


def _slower(profile: LayerProfile, factor: float) -> LayerProfile:
    return replace(
        profile,
        seconds=tuple(factor * seconds for seconds in profile.seconds),
        between_s=factor * profile.between_s,
    )
