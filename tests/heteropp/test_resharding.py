"""Boundary tensors between unlike stages: who sends what to whom."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from clusters import cluster_of
from training_run import make_plan, tiny_model

from ditorch.chips import load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Resharding
from heteropp.layout.resharding import Message, messages

LENGTH = 16
STRATEGIES: tuple[Resharding, ...] = ("all-gather", "broadcast", "direct")


def boundary(dp: tuple[int, int], tp: tuple[int, int], strategy: Resharding) -> list[Message]:
    stages = two_stages(dp, tp).pipelines[0].stages
    return messages(*stages, LENGTH, strategy)


def two_stages(dp: tuple[int, int], tp: tuple[int, int]) -> Plan:
    model = tiny_model(heads=8, kv_heads=8, sequence_length=LENGTH)
    return make_plan(model, (2, 2), dp, tp, (False, False))


@pytest.mark.parametrize("dp", [(1, 1), (2, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("tp", [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_how_often_each_row_crosses_the_boundary(dp: tuple[int, int], tp: tuple[int, int]) -> None:
    for strategy, times in zip(STRATEGIES, (1, 1, tp[1]), strict=True):
        crossed = Counter(
            row for message in boundary(dp, tp, strategy) for row in range(*message.box.ranges[0])
        )
        assert crossed == Counter({row: times for row in range(4 * LENGTH)}), strategy


@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        ((1, 1), (4, 4)),
        ((1, 1), (4, 2)),
        ((1, 1), (2, 4)),
        ((2, 1), (2, 4)),
        ((1, 2), (4, 2)),
        ((1, 1), (8, 2)),
    ],
)
def test_no_other_choice_of_senders_loads_its_busiest_nic_less(
    nics: int, dp: tuple[int, int], tp: tuple[int, int]
) -> None:
    """A chip sends through the NIC that is its own by affinity, or that it shares."""
    plan = two_stages(dp, tp)
    sizes = [dp[s] * tp[s] for s in (0, 1)]
    chip = load_chip("a-mini")
    chip = replace(chip, links=replace(chip.links, nics_per_node=nics))
    cluster = cluster_of(("x", chip, sizes[0]), ("y", chip, sizes[1]))
    found = messages(*plan.pipelines[0].stages, LENGTH)
    senders = [
        next(r.ranks for r in plan.pipelines[0].stages[0].replicas if message.source in r.ranks)
        for message in found
    ]
    every = [
        busiest_s(cluster, [replace(m, source=s) for m, s in zip(found, chosen, strict=True)])
        for chosen in itertools.product(*senders)
    ]
    assert busiest_s(cluster, found) == min(every)


def busiest_s(cluster: Cluster, sent: list[Message]) -> float:
    """Seconds for which the busiest pipe carries a byte a row."""
    filled: Counter[str] = Counter()
    for message in sent:
        for pipe in cluster.route(message.source, message.destination).pipes:
            filled[pipe.name] += message.box.shape[0] / pipe.bytes_per_s
    return max(filled.values())
