"""Plans without their numbers: which ranks make which replicas, stages and pipelines.

Those worth a try on the chips of a cluster, weakest chips first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from heteropp.description.cluster import Cluster
from heteropp.models.spec import ModelSpec

Ranks = tuple[int, ...]  # of a replica
Stage = tuple[Ranks, ...]  # its replicas, all of one tensor-parallel degree
Skeleton = tuple[tuple[Stage, ...], ...]  # by pipeline
Power = Callable[[Ranks], float]  # layers a second of a tensor-parallel group; 0: not known

PIPELINES = (1, 2, 3, 4, 6, 8)  # more exchange their gradients for too long
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
LARGE = 32  # chips, from which on only powers of two are tried of both


def skeletons(cluster: Cluster, model: ModelSpec, power: Power) -> Iterator[Skeleton]:
    """Yields skeletons on all chips of a cluster, whose weakest groups make the first stages.

    Some come more than once.
    """
    large = cluster.world_size >= LARGE
    counts, depths = (
        [n for n in numbers if not large or n.bit_count() == 1] for numbers in (PIPELINES, STAGES)
    )
    for tp in _degrees(cluster, model):
        units = [unit for node in cluster.nodes for unit in pieces(list(node.ranks), tp)]
        for count in counts:
            if count > len(units) or not all(map(power, units)):
                break
            for groups in (_cut(units, count, power), _spread(units, count, power)):
                ordered = [sorted(group, key=lambda unit: (power(unit), unit)) for group in groups]
                most = min(model.layers, max(map(len, ordered)))
                for stages in sorted({most, *(n for n in depths if n < most)}):
                    yield tuple(
                        tuple(_stages(units, min(stages, len(units)), power)) for units in ordered
                    )


def pieces(ranks: Sequence[int], tp: int) -> list[Ranks]:
    """Ranks of one node in tensor-parallel groups, the last ones of smaller powers of two."""
    result, first = [], 0
    for size in (tp, *powers_down(tp - 1)):
        while first + size <= len(ranks):
            result.append(tuple(ranks[first : first + size]))
            first += size
    return result


def powers_down(most: int) -> Iterator[int]:
    return (1 << n for n in reversed(range(most.bit_length())))


def _degrees(cluster: Cluster, model: ModelSpec) -> list[int]:
    """Powers of two that divide the model, up to what some node has."""
    return model.tp_degrees(max(min(len(node.ranks), node.chip.tp_limit) for node in cluster.nodes))


def _spread(units: list[Ranks], count: int, power: Power) -> list[list[Ranks]]:
    """Every unit, the most powerful first, to the group that is weakest so far."""
    groups: list[list[Ranks]] = [[] for _ in range(count)]
    powers = [0.0] * count
    for unit in sorted(units, key=lambda unit: (-power(unit), unit)):
        weakest = powers.index(min(powers))
        groups[weakest].append(unit)
        powers[weakest] += power(unit)
    return groups


def _stages(units: list[Ranks], count: int, power: Power) -> list[Stage]:
    return [stage for group in _cut(units, count, power) for stage in alike(group)]


def _cut(units: list[Ranks], count: int, power: Power) -> list[list[Ranks]]:
    """Returns the units, in order, in `count` parts of about equal power and of at least one
    unit each.
    """
    result: list[list[Ranks]] = []
    total, past = sum(map(power, units)), 0.0
    for index, unit in enumerate(units):
        left = len(units) - index
        begun = len(result)
        middle = past + power(unit) / 2
        full = begun < count and middle >= begun * total / count
        if not result or full or count - begun >= left:  # which leaves one for each part to come
            result.append([])
        result[-1].append(unit)
        past += power(unit)
    return result


def alike(units: list[Ranks]) -> list[Stage]:
    """One stage for each run of groups of one degree."""
    return [tuple(same) for _, same in itertools.groupby(units, len)]
