"""The proven best plan on Metis's cost against every plan there is."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from metis_problems import every_plan, random_problem

from heteropp.search import metis, metis_oom
from heteropp.search.metis_bound import busy_s
from heteropp.search.metis_cost import Line, cost
from heteropp.search.metis_exact import solve
from heteropp.search.metis_walk import Walk

INSTANCES = 24


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    best = min((seconds for seconds, _ in every_plan(problem)), default=math.inf)
    found = solve(problem)
    if found.plan is None:
        assert best == math.inf
        return
    line = Line(problem, found.plan.arrangement.order)
    assert cost(problem, line, found.plan).total_s == pytest.approx(best, rel=1e-9)
    assert found.cost_s == pytest.approx(best, rel=1e-9)
    assert found.gap == 0
    assert busy_s(problem) <= best * (1 + 1e-9)
    for planner in (metis, metis_oom):
        walk = Walk(problem, planner.priority)
        walk.run(keep=1)
        assert not walk.best or walk.best[0][0] >= best * (1 - 1e-9)


def test_few_steps_give_a_plan_and_a_bound_that_hold() -> None:
    for seed in range(INSTANCES):
        problem = random_problem(seed)
        best, hasty = solve(problem), solve(problem, most_steps=0)
        assert hasty.lower_bound_s <= best.cost_s <= hasty.cost_s


def test_order_of_nodes_does_not_matter() -> None:
    for seed in range(INSTANCES):
        problem = random_problem(seed)
        nodes = list(problem.nodes)
        Random(seed).shuffle(nodes)
        nodes.sort(key=lambda node: node.chips)  # those of a type keep their order along the line
        ordered = sorted(problem.nodes, key=lambda node: node.chips)
        found, other = (solve(replace(problem, nodes=tuple(n))) for n in (ordered, nodes))
        assert found.cost_s == other.cost_s


def test_hash_seed_does_not_matter() -> None:
    script = (
        "from metis_problems import random_problem\n"
        "from heteropp.search import metis, metis_oom\n"
        "from heteropp.search.metis_exact import solve\n"
        "from heteropp.search.metis_walk import Walk\n"
        "for seed in range(4):\n"
        "    print(solve(random_problem(seed)))\n"
        "    for planner in (metis, metis_oom):\n"
        "        walk = Walk(random_problem(seed), planner.priority)\n"
        "        walk.run(keep=4)\n"
        "        print(walk.steps, walk.looks, walk.best, walk.nearest)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
