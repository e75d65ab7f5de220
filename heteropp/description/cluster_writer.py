"""Writes a cluster as a file that reads as the same cluster."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heteropp.description.chips import ChipFileError, ChipSpec, load_chip
from heteropp.description.cluster import Cluster, Node, outside
from heteropp.description.files import FileError, write_text


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a file that read_cluster reads as an equal cluster, and its chip files beside it.

    Each file appears whole or not at all. Chip files with an absolute path stay where they are.
    Raises FileError, also where another file lies under a chip file's name, or where a chip file
    would lie outside the folder of `path`.
    """
    paths = {node.chip_name: node.chip.path for node in cluster.nodes}
    for name in paths:
        if problem := outside(name):
            raise FileError(f"{path}: {problem}")
    try:
        chips = {name: load_chip(found) for name, found in paths.items()}
    except ChipFileError as error:
        raise FileError(str(error)) from None
    for name, found in paths.items():
        if name.endswith(".toml") and not Path(name).is_absolute():
            _write_beside(path.parent / name, found.read_text(encoding="utf-8"))
    entries = (_entry(node, chips[node.chip_name]) for node in cluster.nodes)
    counted = ({**entry, "count": len(list(alike))} for entry, alike in itertools.groupby(entries))
    text = _toml({"name": cluster.name, "switches": _bare(cluster)})
    text += "".join("\n[[nodes]]\n" + _toml(entry) for entry in counted)
    text += "".join("\n[[links]]\n" + _toml(asdict(link)) for link in cluster.fabric.links)
    write_text(path, text)


def _entry(node: Node, chip: ChipSpec) -> dict[str, Any]:
    """A [[nodes]] entry, where `chip` is what the chip file says."""
    links, own = chip.links, node.chip.links
    return {
        "chip": node.chip_name,
        "name": node.name,
        "chips": None if node.in_use else len(node.ranks),
        "in_use": node.in_use,
        "region": node.region,
        "switch": node.switch,
        "host_memory_bytes": node.host_memory_bytes,
        "nics": _unlike(own.nics_per_node, links.nics_per_node),
        "nic_bytes_per_s": _unlike(own.nic_bytes_per_s, links.nic_bytes_per_s),
        "nic_latency_s": _unlike(own.nic_latency_s, links.nic_latency_s),
        "efficiency": _unlike(node.chip.compute.efficiency, chip.compute.efficiency),
    }


def _unlike(value: float, given: float) -> float | None:
    return None if value == given else value


def _bare(cluster: Cluster) -> list[str]:
    """The places that links join and no node names."""
    named = {place for node in cluster.nodes for place in (node.region, node.switch)}
    return sorted({place for link in cluster.fabric.links for place in link.between} - named)


def _toml(table: dict[str, Any]) -> str:
    """Returns a TOML line for each key that has a value; JSON writes such values as TOML does."""
    kept = {key: value for key, value in table.items() if value not in (None, "", (), [])}
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in kept.items()
    )


def _write_beside(path: Path, text: str) -> None:
    if not path.exists():
        write_text(path, text)
    elif path.read_text(encoding="utf-8") != text:
        raise FileError(f"{path} is another chip than the cluster's; expected it, or no such file")
