"""A cluster as the page draws it: nodes with their chips, and what links them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heteropp.description.cluster import Node, read_cluster
from heteropp.description.files import FileError


def cluster_view(path: Path, members: Sequence[str] | None) -> dict[str, Any]:
    """Returns the cluster of a file, ready for JSON. Raises FileError.

    members: the chips in use, by rank; None: all.
    """
    cluster = read_cluster(path)
    chips = cluster.world_size
    if members is not None:
        try:
            cluster = cluster.kept(map(cluster.rank, members))
        except ValueError as error:
            raise FileError(f"{path}: {error}") from None
    names = cluster.node_names
    return {
        "name": cluster.name,
        "idle_chips": chips - cluster.world_size,
        "nodes": [_node(name, node) for name, node in zip(names, cluster.nodes, strict=True)],
        "links": [
            {"between": link.between, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for link in cluster.fabric.links
        ],
    }


def _node(name: str, node: Node) -> dict[str, Any]:
    chip, links = node.chip, node.chip.links
    return {
        "name": name,
        "chip": Path(node.chip_name).name.removesuffix(".toml"),
        "chip_type": chip.chip_type,
        "vendor": chip.vendor,
        "place": node.place,
        "region": node.region,
        "ranks": list(node.ranks),
        "capacity_bytes": chip.memory.capacity_bytes,
        "intra_node_bytes_per_s": links.intra_node_bytes_per_s,
        "intra_node_latency_s": links.intra_node_latency_s,
        "nics": links.nics_per_node,
        "nic_bytes_per_s": links.nic_bytes_per_s,
        "nic_latency_s": links.nic_latency_s,
    }
