"""The cluster file: ranks, links, and independence of the file's order."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import write_cluster
from sampled import sampled

from heteropp.description.cluster import Cluster, Link, read_cluster
from heteropp.description.cluster_writer import write_cluster as write
from heteropp.description.files import FileError
from heteropp.description.model import read_model


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
    cluster = read_cluster(f"h2-exp-{experiment}")
    assert {name: len(cluster.ranks_of(name)) for name in cluster.chip_names()} == chips


def test_the_papers_model() -> None:
    """Table 4: about 100 billion parameters."""
    model = read_model("h2-100b")
    attention = 2 * model.hidden**2 + 2 * model.hidden * model.kv_heads * model.head_size
    layer = attention + 3 * model.hidden * model.intermediate
    total = model.layers * layer + 2 * model.vocab * model.hidden
    assert 95e9 < total < 110e9


REGIONS = """
name = "three regions"
[[nodes]]
chip = "a-mini"
chips = 4
nics = 2
region = "east"
[[nodes]]
chip = "b-mini"
chips = 2
region = "west"
switch = "leaf"
nic_bytes_per_s = 3e7
nic_latency_s = 2e-3
[[nodes]]
chip = "c-mini"
chips = 1
region = "north"
[[links]]
between = ["west", "east"]
latency_s = 0.1
bytes_per_s = 1e6
[[links]]
between = ["north", "west"]
latency_s = 0.02
bytes_per_s = 4e7
[[links]]
between = ["east", "north"]
latency_s = 0.03
bytes_per_s = 2e6
[[links]]
between = ["leaf", "west"]
latency_s = 0.001
bytes_per_s = 5e6
"""


def test_a_route_takes_the_quickest_links_and_shares_nics_by_affinity(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(REGIONS)
    cluster = read_cluster(path)
    assert [node.region for node in cluster.nodes] == ["east", "west", "north"]
    route = cluster.route(3, 4)  # 0.02 + 0.03 through north is quicker than 0.1
    assert route.latency_s == pytest.approx(2e-3 + 0.03 + 0.02 + 0.001)
    assert [(pipe.name, pipe.bytes_per_s) for pipe in route.pipes] == [
        ("node 0 NIC 1 out", 1e8),
        ("link east to north", 2e6),
        ("link north to west", 4e7),
        ("link west to leaf", 5e6),
        ("node 1 NIC 0 in", 3e7),
    ]
    assert cluster.link(3, 4) == Link(route.latency_s, 2e6)
    assert [cluster.route(rank, 6).pipes[0].name[-9:] for rank in range(4)] == [
        "NIC 0 out",
        "NIC 0 out",
        "NIC 1 out",
        "NIC 1 out",
    ]
    assert [pipe.name for pipe in cluster.route(0, 1).pipes] == ["rank 0 out", "rank 1 in"]


def test_a_switch_that_no_link_names_is_its_regions(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    node = '[[nodes]]\nchip = "a-mini"\nchips = 1\nswitch = "{}"\n'
    path.write_text('name = "x"\n' + node.format("one") + node.format("two"))
    cluster = read_cluster(path)
    assert [pipe.name for pipe in cluster.route(0, 1).pipes] == [
        "node 0 NIC 0 out",
        "node 1 NIC 0 in",
    ]


def link(one: str, other: str, size: str = "1e9") -> str:
    return f'[[links]]\nbetween = ["{one}", "{other}"]\nlatency_s = 0.1\nbytes_per_s = {size}\n'


def test_of_two_equal_ways_between_leaves_one_is_taken(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    node = '[[nodes]]\nchip = "a-mini"\nchips = 1\nswitch = "{}"\n'
    leaves, spines = ("leaf1", "leaf2"), ("spine1", "spine2")
    path.write_text(
        'name = "x"\nswitches = ["spine1", "spine2"]\n'
        + "".join(map(node.format, leaves))
        + "".join(link(leaf, spine) for leaf in leaves for spine in spines)
    )
    cluster = read_cluster(path)
    routes = {tuple(pipe.name for pipe in cluster.route(0, 1).pipes) for _ in range(3)}
    assert routes == {
        ("node 0 NIC 0 out", "link leaf1 to spine1", "link spine1 to leaf2", "node 1 NIC 0 in")
    }


NODES = 'name = "x"\n' + "".join(
    f'[[nodes]]\nchip = "a-mini"\nregion = "{region}"\nswitch = "{switch}"\n'
    for region, switch in [("east", "leaf"), ("west", "spine")]
)
JOINED = link("east", "west")
BAD_FABRICS = {
    "no links at all": (NODES, "nothing links 'leaf' and 'spine'"),
    "a third region left out": (
        NODES + JOINED + '[[nodes]]\nchip = "b-mini"\nregion = "north"\n',
        "nothing links",
    ),
    "some nodes have no region": (NODES + JOINED + '[[nodes]]\nchip = "b-mini"\n', "no region"),
    "unknown region": (NODES + link("east", "south"), "is called 'south'"),
    "links of a simple cluster": (
        'name = "x"\n[[nodes]]\nchip = "a-mini"\n' + link("a", "b"),
        "the nodes name none",
    ),
    "two links for one pair": (NODES + JOINED + link("west", "east"), "links[0] already joins"),
    "a link to itself": (NODES + link("east", "east"), "names 'east' twice"),
    "a switch in two regions": (NODES.replace("spine", "leaf") + JOINED, "is in two regions"),
    "a switch called as a region": (NODES.replace("leaf", "west") + JOINED, "both a region and a"),
    "a link of three": (NODES + JOINED.replace('"west"]', '"west", "leaf"]'), "links[0].between"),
    "no bandwidth": (NODES + link("east", "west", "0"), "links[0].bytes_per_s"),
    "endless bandwidth": (NODES + link("east", "west", "inf"), "links[0].bytes_per_s"),
    "no NICs": (NODES + JOINED + "nics = 0", "links[0].nics: unknown key"),
    "no NIC": (NODES.replace("switch", "nics = 0\nswitch", 1) + JOINED, "nodes[0].nics"),
    "negative latency": (NODES + JOINED.replace("0.1", "-0.1"), "links[0].latency_s"),
    "empty region": (NODES.replace("east", "", 1) + JOINED, "nodes[0].region"),
}


@pytest.mark.parametrize("kind", BAD_FABRICS)
def test_a_fabric_that_cannot_be_is_one_sentence(tmp_path, kind: str) -> None:
    text, expected = BAD_FABRICS[kind]
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        read_cluster(path)
    assert expected in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hundred_thousand_chips_are_looked_up_by_rank(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "x"\n'
        + '[[nodes]]\nchip = "a"\ncount = 3125\nregion = "east"\n'
        + '[[nodes]]\nchip = "b"\ncount = 6250\nregion = "west"\n'
        + link("west", "east")
    )
    cluster = read_cluster(path)
    assert cluster.world_size == 100_000
    assert cluster.node(49_999).chip_name == "a" and cluster.node(50_000).chip_name == "b"
    assert cluster.node(99_999).ranks == range(99_992, 100_000)
    assert [pipe.name for pipe in cluster.route(50_001, 17).pipes] == [
        "node 3125 NIC 1 out",
        "link west to east",
        "node 1 NIC 0 in",
    ]
    for rank in (-1, 100_000):
        with pytest.raises(ValueError, match=f"rank {rank} is not in cluster x"):
            cluster.node(rank)


def test_an_efficiency_measured_on_the_cluster_replaces_the_chip_files(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    node = '[[nodes]]\nchip = "a-mini"\nchips = {}\nefficiency = {}\n'
    path.write_text('name = "x"\n' + node.format(2, 0.25) + node.format(1, 0.25))
    cluster = read_cluster(path)
    assert [cluster.chip(rank).compute.efficiency for rank in range(3)] == [0.25] * 3
    for other in ("0.5", "0.0", "1.5"):
        path.write_text('name = "x"\n' + node.format(2, 0.25) + node.format(1, other))
        with pytest.raises(FileError, match=r"nodes\[1\]\.efficiency"):
            read_cluster(path)


def test_chips_keep_their_names_when_others_go(tmp_path) -> None:
    cluster = read_cluster(write_cluster(tmp_path / "c.toml", ("a-mini", 4), ("a-mini", 4)))
    assert cluster.node_names == ("a-mini-0", "a-mini-1")
    assert cluster.members[2:6] == ("a-mini-0/2", "a-mini-0/3", "a-mini-1/0", "a-mini-1/1")
    left = cluster.kept(rank for rank in range(8) if rank != 1)
    # the node that lost a chip comes after its equal now
    assert left.node_names == ("a-mini-1", "a-mini-0")
    assert [list(node.ranks) for node in left.nodes] == [[0, 1, 2, 3], [4, 5, 6]]
    assert left.members[4:] == ("a-mini-0/0", "a-mini-0/2", "a-mini-0/3")
    assert [cluster.rank(member) for member in left.members] == [4, 5, 6, 7, 0, 2, 3]
    assert left.nodes[1].chip.links == cluster.nodes[0].chip.links
    alone = left.kept([left.rank("a-mini-0/3")])
    assert alone.members == ("a-mini-0/3",)
    with pytest.raises(ValueError, match="a-mini-0/1 is not in cluster test"):
        left.rank("a-mini-0/1")
    with pytest.raises(ValueError, match="none of the 8 chips"):
        cluster.kept([])


def test_names_are_of_the_file_or_the_first_that_are_free(tmp_path) -> None:
    path = tmp_path / "c.toml"
    node = '[[nodes]]\nchip = "a-mini"\nchips = 1\n'
    path.write_text(f'name = "x"\n{node}{node}{node}name = "a-mini-0"\n{node}name = "left"\n')
    assert read_cluster(path).node_names == ("a-mini-1", "a-mini-2", "left", "a-mini-0")


@pytest.mark.parametrize("seed", sampled(range(4), 1, everyday=2))
def test_what_is_kept_is_written_and_read_back_equal(tmp_path, seed: int) -> None:
    from ditorch.chips import load_chip

    generator = random.Random(seed)
    (tmp_path / "mine.toml").write_text(load_chip("b-mini").path.read_text())
    path = tmp_path / "cluster.toml"
    path.write_text(
        REGIONS.replace('"b-mini"', '"mine.toml"')
        + '[[nodes]]\nchip = "a-mini"\ncount = 2\nregion = "east"\n'
    )
    cluster = read_cluster(path)
    while cluster.world_size > 1:
        went = generator.sample(range(cluster.world_size), min(2, cluster.world_size - 1))
        left = cluster.kept(set(range(cluster.world_size)) - set(went))
        assert not {cluster.members[rank] for rank in went} & set(left.members)
        again = read_cluster(written(left, tmp_path / f"{left.world_size}"))
        assert again == left and again.members == left.members
        for source in range(left.world_size):  # the links are those that there were
            for destination in range(left.world_size):
                old = [cluster.rank(left.members[rank]) for rank in (source, destination)]
                assert left.link(source, destination).latency_s == cluster.link(*old).latency_s
        cluster = left


def written(cluster: Cluster, folder: Path) -> Path:
    write(cluster, folder / "cluster.toml")
    return folder / "cluster.toml"


def test_what_nodes_have_of_their_own_is_written(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "two \\"ü\\""\n'
        '[[nodes]]\nchip = "a-mini"\ncount = 3\nchips = 2\nnics = 3\nefficiency = 0.25\n'
        "nic_bytes_per_s = 3e7\nnic_latency_s = 0.0\nhost_memory_bytes = 5_000\n"
    )
    cluster = read_cluster(path)
    assert {node.host_memory_bytes for node in cluster.nodes} == {5000}
    folder = tmp_path / "again"
    assert read_cluster(written(cluster, folder)) == cluster
    text = (folder / "cluster.toml").read_text()
    assert "count = 3" in text and text.count("[[nodes]]") == 1
    assert cluster.kept([0, 1, 5]).nodes[1].slots == (1,)


def test_another_chips_file_is_not_written_over(tmp_path) -> None:
    from ditorch.chips import load_chip

    (tmp_path / "mine.toml").write_text(load_chip("b-mini").path.read_text())
    cluster = read_cluster(write_cluster(tmp_path / "c.toml", ("mine.toml", 1)))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "mine.toml").write_text("")
    with pytest.raises(FileError, match="is another chip"):
        write(cluster, folder / "c.toml")


def test_a_chip_file_outside_the_folder_is_refused(tmp_path) -> None:
    from ditorch.chips import load_chip

    (tmp_path / "chips").mkdir()
    (tmp_path / "clusters").mkdir()
    chip = tmp_path / "chips" / "mine.toml"
    chip.write_text(load_chip("b-mini").path.read_text())
    path = write_cluster(tmp_path / "clusters" / "c.toml", ("../chips/mine.toml", 1))
    expected = r"chip \.\./chips/mine\.toml has \.\. in its path; expected a path below the folder"
    with pytest.raises(FileError, match=rf"nodes\[0\]\.{expected}"):
        read_cluster(path)
    absolute = read_cluster(write_cluster(path, (str(chip), 1)))
    folder = tmp_path / "copies" / "one"
    assert read_cluster(written(absolute, folder)) == absolute
    assert [file.name for file in folder.iterdir()] == ["cluster.toml"]
    named = Cluster("made", (replace(absolute.nodes[0], chip_name="../chips/mine.toml"),))
    with pytest.raises(FileError, match=expected):
        write(named, folder / "other.toml")
    assert [file.name for file in folder.parent.iterdir()] == ["one"]


NODE = 'name = "x"\n[[nodes]]\nchip = "a-mini"\n'
BAD_NODES = {
    "a name of two": (NODE + 'name = "one"\ncount = 2\n', "nodes[0].count is 2; expected 1"),
    "one name twice": (
        NODE + 'name = "one"\n[[nodes]]\nchip = "b-mini"\nname = "one"\n',
        "nodes[1].name 'one' is that of nodes[0]",
    ),
    "a name with a slash": (NODE + 'name = "one/1"\n', "nodes[0].name"),
    "chips that are not there": (NODE + "in_use = [0, 99]\n", "nodes[0].in_use is [0, 99]"),
    "chips out of order": (NODE + "in_use = [1, 0]\n", "expected ascending numbers"),
    "no chips": (NODE + "in_use = []\n", "nodes[0].in_use"),
    "chips twice": (NODE + "in_use = [1]\nchips = 1\n", "no `chips` beside"),
}


@pytest.mark.parametrize("kind", BAD_NODES)
def test_nodes_that_cannot_be_are_one_sentence(tmp_path, kind: str) -> None:
    text, expected = BAD_NODES[kind]
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        read_cluster(path)
    assert expected in str(error.value) and "\n" not in str(error.value)
