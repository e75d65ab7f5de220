"""A lower bound on Metis's cost: all chips busy all the time, each at its best."""

from __future__ import annotations

from heteropp.search.metis_problem import Problem


def busy_s(problem: Problem) -> float:
    """Returns seconds that every plan takes at least, whatever its stages.

    A step takes b times the slowest stage, so no chip works longer. On one layer of one sequence a
    chip works at least the least of its type's profiles times tp over the batch, and that is at
    least its type's `pace` times the layer's weight.
    """
    weight = problem.profiles.by_type[problem.types[0]][1, 1].seconds
    rate = 0.0  # sequences a second of the whole cluster
    for node in problem.nodes:
        profiles = problem.profiles.by_type[node.chip]
        pace = min(
            tp * seconds / batch / of_layer
            for (tp, batch), profile in profiles.items()
            if tp in problem.degrees and batch <= problem.largest_batch
            for seconds, of_layer in zip(profile.seconds, weight, strict=True)
        )
        rate += node.chips / (pace * sum(weight))
    return problem.global_batch / rate
