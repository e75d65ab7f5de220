"""The link that a collective meets at each rank of a group, for all of its ranks at once."""

from __future__ import annotations

from random import Random

import pytest
from clusters import cluster_of

from heteropp.cost.planned import slowest_link, slowest_links
from heteropp.description.chips import load_chip
from heteropp.description.cluster import Cluster, Link, read_cluster

PRESETS = ("quickstart", "autohet-16", "zorse-a")


def made_up() -> Cluster:
    chips = [load_chip(name) for name in ("a-mini", "b-mini", "c-mini", "a-mini", "b-mini")]
    return cluster_of(*((str(i % 3), chip, 1 + i % 4) for i, chip in enumerate(2 * chips)))


@pytest.mark.parametrize("name", [*PRESETS, "made up"])
def test_every_rank_has_its_own_slowest_link(name: str) -> None:
    cluster = made_up() if name == "made up" else read_cluster(name)
    random = Random(name)
    for _ in range(100):
        size = min(random.choice([1, 2, 3, 5, 9, 17]), cluster.world_size)
        group = random.sample(range(cluster.world_size), size)
        found = slowest_links(cluster, group)
        assert found == {rank: slowest_link(cluster, rank, group) for rank in group}
        if size == 1:
            assert found == {group[0]: Link(0.0, float("inf"))}
        elif len({cluster.node_index(rank) for rank in group}) > 1:
            for rank in group:
                to_each = [cluster.link(rank, peer).bytes_per_s for peer in group if peer != rank]
                assert found[rank].bytes_per_s == min(to_each)
