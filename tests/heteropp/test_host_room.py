"""A node whose file says how much host memory it has gets no plan that offloads more to it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model
from layouts import plan_of, scheduled
from typer.testing import CliRunner

from heteropp.cli.search import app
from heteropp.cost.capacity import check_memory, fits
from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan, PlanError
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, Request


def offloading() -> Plan:
    """A plan of two ranks, which hold four ministages each."""
    plan = plan_of(tiny_model(8), (4, 4), (1, 1), (1, 1), offload=True)
    return scheduled(plan, "gpipe", 4, 4)


def of_two_chips(folder: Path, room_bytes: int | None) -> Cluster:
    """The plans' chips in one node, whose host has so much room."""
    cluster = read_cluster(write_cluster(folder / "cluster.toml", ("a-mini", 2)))
    name = offloading().chip(0)
    nodes = [replace(node, chip_name=name, host_memory_bytes=room_bytes) for node in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


def test_the_ranks_of_a_node_share_its_host_s_memory(tmp_path: Path) -> None:
    plan = offloading()
    first, second = (memory.host for memory in rank_memory(plan))
    assert first and second  # test_memory.py measures them
    need = first + second
    for room_bytes in (None, need):
        check_memory(plan, of_two_chips(tmp_path, room_bytes))
    little = of_two_chips(tmp_path, need - 1)
    assert not fits(plan, little)
    sentence = r"^offloading needs ([\d.]+ MiB) of host memory on node \S+-0, for which .* has \1$"
    with pytest.raises(PlanError, match=sentence):
        check_memory(plan, little)
    kept = scheduled(plan_of(plan.model, (4, 4), (1, 1), (1, 1)), "gpipe", 4, 4)
    check_memory(kept, of_two_chips(tmp_path, 1))


def test_the_search_keeps_to_it_and_says_what_is_filled(tmp_path: Path) -> None:
    """Planner zorse offloads whatever has ministages, of which two stay on the chip."""
    model = write_model(tmp_path / "model.toml", tiny_model(8))
    path = write_cluster(tmp_path / "cluster.toml", ("a-mini", 2))
    asked = ["--cluster", path, "--model", model, "--global-batch", "8", "--planner", "zorse"]

    def searched() -> str:
        found = CliRunner().invoke(app, [*map(str, asked)])
        assert found.exit_code == 0, found.stderr
        return found.stdout

    said = searched()
    filled = re.search(r"fills up to ([\d.]+) KiB of the host memory of node a-mini-0\n", said)
    assert filled and "8 o in 8" in said
    entry, room_kib = path.read_text(), int(float(filled[1])) + 1
    path.write_text(f"{entry}host_memory_bytes = {room_kib * 1024}\n")
    assert f"node a-mini-0, which has {room_kib}.0 KiB for it" in searched()
    path.write_text(f"{entry}host_memory_bytes = {room_kib * 512}\n")
    said = searched()
    assert "8 o in 2" in said and "offloading fills" not in said


def test_the_default_planner_says_whose_memory_lacks_least(tmp_path: Path) -> None:
    """Chips have enough only where stages are offloaded, and at last not even then."""
    cluster = read_cluster(write_cluster(tmp_path / "cluster.toml", ("a-mini", 2)))
    whole = Request(cluster=cluster, model=tiny_model(8), global_batch=8, open=frozenset(OPTIONS))

    def sentence(chip_bytes: int, host_bytes: int | None) -> str:
        nodes = []
        for node in cluster.nodes:
            memory = replace(node.chip.memory, capacity_bytes=chip_bytes)
            chip = replace(node.chip, memory=memory)
            nodes.append(replace(node, chip=chip, host_memory_bytes=host_bytes))
        return str(ask("auto", replace(whole, cluster=replace(cluster, nodes=tuple(nodes)))).error)

    assert sentence(250_000, None) == "None"
    assert re.search(r"offloading needs [\d.]+ KiB of host memory on", sentence(250_000, 1000))
    assert re.search(r"stage \d needs [\d.]+ KiB on rank \d", sentence(100_000, 1000))
