"""The best plan under Metis's cost, proven.

Chosen jointly: the order of the chip types, the number of micro-batches, and for each stage its
chips (a power of two, whatever Metis's limits on their variance and order), its tensor-parallel
degree and its layers; memory as in metis_cost, with one micro-batch in flight. This holds all that
Metis and metis-oom look at.

For one order and number of micro-batches, the formula is a sum over stages, which a dynamic
programme over chips and layers minimises, and three largest values: a micro-batch's, the update's
and the gradients' seconds. Boxes of those three are parted, the one of least bound first: a bound
is the box's lower corner plus the least sum with no value beyond its upper corner, and the stages
of that sum are a plan (csrc/planner/metis.cpp).
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass

from heteropp import _planner
from heteropp.search.metis_bound import busy_s
from heteropp.search.metis_cost import Arrangement, MetisPlan
from heteropp.search.metis_problem import Problem

MOST_STEPS = 1 << 40  # as good as none


@dataclass(frozen=True)
class Proven:
    plan: MetisPlan | None  # None if none fits
    cost_s: float
    lower_bound_s: float  # no plan costs less
    steps: int  # dynamic programmes solved

    @property
    def gap(self) -> float:
        return 0.0 if self.plan is None else self.cost_s / self.lower_bound_s - 1


def solve(problem: Problem, most_steps: int = MOST_STEPS) -> Proven:
    """Returns the plan of least cost, with the proof that its lower bound is.

    Where `most_steps` are too few, it is the best plan found by then, and the bound has a gap.
    """
    found = _planner.solve_metis(_native(problem), most_steps)
    plan = None
    if found.cost_s < math.inf:
        chips, tps, layers = zip(*found.stages, strict=True)
        plan = MetisPlan(
            Arrangement(problem.orders[found.order], chips, found.micro_batches),
            tuple((size // tp, tp) for size, tp in zip(chips, tps, strict=True)),
            tuple(itertools.accumulate(layers, initial=0)),
        )
    return Proven(plan, found.cost_s, found.lower_bound_s, found.steps)


def _native(problem: Problem) -> _planner.MetisProblem:
    profiles, index = problem.profiles, {chip: i for i, chip in enumerate(problem.types)}
    return _planner.MetisProblem(
        layers=profiles.layers,
        global_batch=problem.global_batch,
        largest_batch=problem.largest_batch,
        types=[_chip_type(problem, chip) for chip in problem.types],
        nodes=[(index[node.chip], node.chips) for node in problem.nodes],
        orders=[[index[chip] for chip in order] for order in problem.orders],
        micro_batches=problem.micro_batch_counts,
        degrees=list(problem.degrees),
        parameter_bytes=problem.parameter_sums,
        activation_bytes=problem.activation_bytes,
        batch_s=profiles.batch_s,
        pooled=problem.pooled,
        busy_s=busy_s(problem),
    )


def _chip_type(problem: Problem, chip: str) -> _planner.MetisChipType:
    profiles = {}
    for tp, batch in problem.profiles.by_type[chip]:
        row = problem.row(chip, tp, batch)
        if row is None:
            continue
        profiles[tp, batch] = _planner.MetisProfile(
            seconds=row.seconds,
            between_s=row.between_s,
            # of the stage with fewest micro-batches in flight, which is one
            held_bytes=tuple(map(operator.add, row.held_bytes, row.kept_bytes)),
            divided_bytes=row.divided_bytes,
            capacity_bytes=row.capacity_bytes,
        )
    return _planner.MetisChipType(
        intra_bytes_per_s=problem.intra_bytes_per_s[chip],
        inter_bytes_per_s=problem.inter_bytes_per_s[chip],
        collective_bytes_per_s=problem.collective_bytes_per_s[chip],
        update_s=problem.profiles.update_s[chip],
        profiles=profiles,
    )
