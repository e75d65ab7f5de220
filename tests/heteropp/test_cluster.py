"""The cluster file: ranks, links, and independence of the file's order."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import write_cluster

from heteropp.cluster import read_cluster
from heteropp.model import read_model

PRESETS = Path(__file__).parents[2] / "heteropp" / "presets"


def test_ranks_do_not_depend_on_the_order_of_the_file(tmp_path) -> None:
    entries = [("c-mini", 2), ("a-mini", 2), ("d-mini", 1), ("b-mini", 1)]
    one = read_cluster(write_cluster(tmp_path / "one.toml", *entries))
    other = read_cluster(write_cluster(tmp_path / "other.toml", *reversed(entries)))
    assert one == other
    assert [node.chip_name for node in one.nodes] == ["a-mini", "b-mini", "c-mini", "d-mini"]
    assert [list(node.ranks) for node in one.nodes] == [[0, 1], [2], [3, 4], [5]]


def test_a_node_has_all_its_chips_unless_told(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('name = "two"\n[[nodes]]\nchip = "a"\ncount = 2\n')
    cluster = read_cluster(path)
    assert cluster.world_size == 32
    assert cluster.ranks_of("a") == list(range(32))


def test_links(tmp_path) -> None:
    cluster = read_cluster(write_cluster(tmp_path / "c.toml", ("a-mini", 2), ("c-mini", 8)))
    a, c = cluster.chip(0), cluster.chip(2)
    inside = cluster.link(0, 1)
    assert inside.latency_s == a.links.intra_node_latency_s
    assert inside.bytes_per_s == a.links.intra_node_bytes_per_s
    across = cluster.link(0, 2)
    assert across.latency_s == max(a.links.nic_latency_s, c.links.nic_latency_s)
    # eight chips share four NICs
    assert across.bytes_per_s == min(a.links.nic_bytes_per_s, c.links.nic_bytes_per_s / 2)
    assert cluster.link(2, 0) == across


def test_a_chip_file_beside_the_cluster_file(tmp_path) -> None:
    from ditorch.chips import load_chip

    (tmp_path / "mine.toml").write_text(load_chip("b-mini").path.read_text())
    cluster = read_cluster(write_cluster(tmp_path / "c.toml", ("mine.toml", 1)))
    assert cluster.chip(0).vendor == "B"


@pytest.mark.parametrize(
    ("experiment", "chips"),
    [
        ("a", {"a": 256, "b": 256, "c": 256}),
        ("b", {"a": 256, "b": 256, "c": 256, "d": 256}),
        ("c", {"a": 384, "b": 1024}),
        ("d", {"a": 384, "b": 2048}),
    ],
)
def test_the_papers_clusters(experiment: str, chips: dict[str, int]) -> None:
    """Table 7."""
    cluster = read_cluster(PRESETS / f"h2-exp-{experiment}.toml")
    assert {name: len(cluster.ranks_of(name)) for name in cluster.chip_names()} == chips


def test_the_papers_model() -> None:
    """Table 4: about 100 billion parameters."""
    model = read_model(PRESETS / "h2-model.toml")
    attention = 2 * model.hidden**2 + 2 * model.hidden * model.kv_heads * model.head_size
    layer = attention + 3 * model.hidden * model.intermediate
    total = model.layers * layer + 2 * model.vocab * model.hidden
    assert 95e9 < total < 110e9
