"""Chips, clusters and models that tests of the planner make up."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from ditorch.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster, Node
from heteropp.models.llama.model import LlamaModel


def tiny_model(layers: int = 4, **changes) -> LlamaModel:
    shape = dict(hidden=16, heads=4, kv_heads=4, intermediate=32, vocab=32, sequence_length=16)
    return LlamaModel(name="tiny", layers=layers, **{**shape, **changes})


def random_chip(generator: random.Random) -> ChipSpec:
    """A mini chip with its own speed, memory and links."""
    chip = load_chip(generator.choice(["a-mini", "b-mini", "c-mini", "d-mini"]))
    memory = replace(
        chip.memory,
        capacity_bytes=generator.choice([40_000, 80_000, 120_000, 200_000, 10_000_000]),
        bandwidth_bytes_per_s=10 ** generator.uniform(7, 9),
    )
    links = replace(chip.links, intra_node_bytes_per_s=10 ** generator.uniform(6, 8))
    return replace(chip, memory=memory, links=links, tp_limit=generator.choice([1, 2, 4]))


def cluster_of(*nodes: tuple[str, ChipSpec, int]) -> Cluster:
    """Nodes of (name, chip, chips in use), put in canonical order."""
    ordered = sorted(nodes, key=lambda node: (-node[1].memory.capacity_bytes, node[0]))
    result, first = [], 0
    for name, chip, size in ordered:
        result.append(Node(name, chip, range(first, first + size)))
        first += size
    return Cluster("made up", tuple(result))


def write_cluster(path: Path, *entries: tuple[str, int]) -> Path:
    """A cluster file of (chip, chips in use) nodes."""
    text = 'name = "test"\n'
    text += "".join(f'[[nodes]]\nchip = "{chip}"\nchips = {chips}\n' for chip, chips in entries)
    path.write_text(text)
    return path


def write_model(path: Path, model: LlamaModel) -> Path:
    sizes = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "sequence_length")
    text = f'name = "{model.name}"\ndtype = "{model.dtype}"\n'
    path.write_text(text + "".join(f"{name} = {getattr(model, name)}\n" for name in sizes))
    return path
