"""Random small problems of Metis's, and the best plan of each by trying every one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from heteropp.search.metis_cost import Arrangement, Line, MetisPlan, cost
from heteropp.search.metis_files import LayerProfile, MetisNode, Profiles
from heteropp.search.metis_problem import Problem


def random_problem(seed: int) -> Problem:
    random = Random(seed)
    types = ["a", "b", "c"][: random.choice((1, 2, 2, 2, 3))]
    layers = random.randint(1, 5)
    uneven = random.random() < 0.7
    by_layer = [random.uniform(0.5, 2) if uneven else 1.0 for _ in range(layers)]
    return Problem(
        nodes=tuple(_nodes(random, types)),
        profiles=Profiles(
            layers=layers,
            parameter_bytes=tuple(1e6 * share for share in by_layer),
            update_s={chip: random.uniform(0, 2) for chip in types},
            batch_s=random.choice((0.0, 0.1)),
            by_type={chip: _profiles(random, by_layer) for chip in types},
        ),
        global_batch=random.choice((1, 4, 6, 8, 12)),
        activation_bytes=random.uniform(0, 2e5),
        degrees=random.choice(((1,), (1, 2), (1, 2, 4))),
        largest_batch=random.choice((3, 8)),
        pooled=random.random() < 0.5,
        variance=random.choice((0.0, 0.5, 1.0)),
    )


def _nodes(random: Random, types: list[str]) -> Iterator[MetisNode]:
    left = 6
    for chip in types:
        capacity = random.choice((30.0, 100.0, 500.0))
        for _ in range(random.randint(1, 2)):
            chips = min(random.choice((1, 2, 3, 4)), left)
            if chips:
                intra, inter = random.uniform(2e5, 1e7), random.uniform(1e5, 3e6)
                groups = Random(intra)  # whose collectives are measured, of half the nodes
                own = [groups.uniform(2e5, 1e7) for _ in range(chips + 1)]
                collectives = tuple(own) if groups.random() < 0.5 else ()
                yield MetisNode(chip, chips, capacity, intra, inter, collectives)
            left -= chips


def _profiles(random: Random, by_layer: list[float]) -> dict[tuple[int, int], LayerProfile]:
    pace, table = random.uniform(0.2, 1), {}
    for tp, batch in itertools.product((1, 2, 4), (1, 2, 4, 8)):
        if (tp, batch) != (1, 1) and random.random() < 0.1:
            continue  # not profiled
        time = pace * batch / tp * random.uniform(0.8, 1.3)
        memory = (2 + batch) / tp
        table[tp, batch] = LayerProfile(
            seconds=tuple(time * share for share in by_layer),
            between_s=random.uniform(0, 0.3) * batch,
            memory_bytes=tuple(memory * share for share in by_layer),
            divided_bytes=tuple(memory * share for share in by_layer),
            kept_bytes=(0.0,) * len(by_layer),
            stage_bytes=0.0,
        )
    return table


def every_plan(problem: Problem) -> Iterator[tuple[float, MetisPlan]]:
    """Every plan that fits, with its cost."""
    layers = problem.profiles.layers
    for order in itertools.permutations({node.chip for node in problem.nodes}):
        line = Line(problem, order)
        for groups, micro_batches in itertools.product(
            _groups(len(line.types), layers), range(1, problem.global_batch + 1)
        ):
            if problem.global_batch % micro_batches:
                continue
            for tps in itertools.product((1, 2, 4), repeat=len(groups)):
                firsts = itertools.accumulate(groups[:-1], initial=0)
                stages = [
                    line.group(first, size, tp, micro_batches)
                    for first, size, tp in zip(firsts, groups, tps, strict=True)
                ]
                if None in stages:
                    continue
                for cuts in itertools.combinations(range(1, layers), len(groups) - 1):
                    boundaries = (0, *cuts, layers)
                    needs = [
                        stage.memory(*held, in_flight=1)
                        for stage, held in zip(stages, itertools.pairwise(boundaries), strict=True)
                        if stage
                    ]
                    if all(need <= room for need, room in needs):
                        degrees = tuple((g // t, t) for g, t in zip(groups, tps, strict=True))
                        plan = MetisPlan(
                            Arrangement(order, groups, micro_batches), degrees, boundaries
                        )
                        yield cost(problem, line, plan).total_s, plan


def _groups(chips: int, most: int) -> Iterator[tuple[int, ...]]:
    if chips == 0:
        yield ()
    if most > 0:
        for size in (1, 2, 4, 8):
            if size <= chips:
                for others in _groups(chips - size, most - 1):
                    yield (size, *others)
