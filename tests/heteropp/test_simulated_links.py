"""Simulated messages against closed forms: links that are shared, and waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import cluster_of
from invented import Invent
from test_simulate import chip_with, layer_time, plan_of, uniform

from heteropp.description.cluster import Cluster
from heteropp.description.fabric import Fabric, LinkEntry
from heteropp.schedule.action import Kind
from heteropp.simulator.simulate import simulate


def sent_through(cluster: Cluster, dp: int, emulated: bool = False) -> list[float]:
    """When each replica of the second stage has its first activation, all sent at 0."""
    plan = plan_of(2, 1, dp=dp)
    spans = simulate(plan, cluster, emulated=emulated).spans
    return sorted(span.end_s for span in spans if span.name == Kind.RECV_ACTIVATION)


def two_nodes(size: int, nics: int, **links: float) -> Cluster:
    own = dict(nics_per_node=nics, nic_bytes_per_s=1e3, nic_latency_s=0.5)
    chip = chip_with(**{**own, **links})
    return cluster_of(("x", chip, size), ("x", chip, size))


def test_chips_of_a_node_share_its_nics(invent_times: Invent) -> None:
    invent_times(layer_time())
    size = 16 * 16 * 4
    alone = size / 1e3 + 0.5
    assert sent_through(two_nodes(2, 2), 2) == pytest.approx([alone, alone])
    shared = sent_through(two_nodes(2, 1), 2)
    assert shared == pytest.approx([alone, alone + size / 1e3])
    # an emulated pair of ranks has its share for itself, whoever else sends
    fair = 2 * size / 1e3 + 0.5
    assert sent_through(two_nodes(2, 1), 2, emulated=True) == pytest.approx([fair, fair])


def test_nodes_share_the_link_between_their_regions(invent_times: Invent) -> None:
    invent_times(layer_time())
    cluster = two_nodes(3, 3)
    link = LinkEntry(between=("east", "west"), latency_s=0.25, bytes_per_s=500.0)
    nodes = tuple(
        replace(node, region=region)
        for node, region in zip(cluster.nodes, ("east", "west"), strict=True)
    )
    cluster = Cluster("two regions", nodes, Fabric.of([("east", ""), ("west", "")], (link,)))
    each = 16 * 16 * 4 / 500
    assert sent_through(cluster, 3) == pytest.approx([0.75 + i * each for i in (1, 2, 3)])


def test_messages_take_latency_and_bandwidth_and_wait_for_the_link() -> None:
    plan, cluster = uniform(2, 4)
    fast = simulate(plan, cluster).step_s
    slow_cluster = cluster_of(("x", chip_with(intra_node_bytes_per_s=1e3), 2))
    size = plan.model.sequence_length * plan.model.hidden * 4
    slow = simulate(plan, slow_cluster).step_s
    # the last micro-batch waits for three tensors on the link before its own, then comes back
    assert slow >= 4 * size / 1e3
    assert slow <= fast + 8 * size / 1e3
    shares = simulate(plan, slow_cluster).stage_shares
    assert (
        shares[1, 0].communication > 0.5 if (1, 0) in shares else shares[0, 1].communication > 0.5
    )
