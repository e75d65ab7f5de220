"""The profile file: what was measured of chips and links, in place of what is computed of them.

Stages are measured in blocks of 1, 2, 4, 8 ... layers, which make up any number of layers
(AutoHet, equation 5), and the embedding and the head with one layer each. A block is measured on
one chip, as one rank of its tensor-parallel group; the group's collectives are the links'.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link, Node, Route
from heteropp.description.fabric import Pipe
from heteropp.description.files import FileError, read_json, write_json
from heteropp.models.spec import ModelSpec

PROFILE_VERSION = 1

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class ProfileError(ValueError):
    """A profile that does not say what is asked; the message is one sentence."""


@dataclass(frozen=True, kw_only=True, order=True)
class Block:
    """What is measured: some layers, with the embedding if `first`, the head and loss if `last`."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    chip: Name  # the chip, as the cluster file names it
    tp: Count  # tensor-parallel degree, of whose group one rank was measured
    sequences: Count  # number of sequences in the micro-batch
    layers: Count  # number of layers
    first: bool  # whether it begins with the embedding
    last: bool  # whether it ends with the head and the loss


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank measured of a block: for one micro-batch, but norm and update for one step.

    Bytes are those beside parameters, gradients, optimizer state and constants; null where the
    device does not count its memory.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    block: Block  # what was measured
    forward_s: Seconds  # seconds of a forward
    recompute_s: Seconds  # seconds of a forward that keeps nothing, which recompute adds
    backward_input_s: Seconds  # seconds of the backward's part that gives the input's gradient
    backward_weight_s: Seconds  # seconds of the backward's part that gives the weights' gradients
    norm_s: Seconds  # seconds of the gradients' norm
    update_s: Seconds  # seconds of clipping and AdamW
    kept_bytes: Bytes | None  # bytes in use after a forward, its input included
    kept_recompute_bytes: Bytes | None  # the same, where the stage recomputes
    working_bytes: Bytes | None  # most bytes in use during a forward and its backward
    update_bytes: Bytes | None  # most bytes in use during the update
    library_bytes: Bytes | None = None  # bytes that the chip's libraries keep for good


@dataclass(frozen=True, kw_only=True, order=True)
class PairKind:
    """A kind of pairs of ranks, between which a message takes equally long in either direction."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    chips: tuple[Name, Name]  # the two chips, as the cluster file names them, in sorted order
    places: tuple[str, str]  # the switch or else the region of each one's node; "": none is named
    same_node: bool  # whether both are in one node


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """The latency and bandwidth that were measured of messages between two chips."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    pair: PairKind  # which two chips
    latency_s: Seconds  # latency of a message, in seconds
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # bandwidth of one direction


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Complete or not: an interrupted measurement goes on where its file ends."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: Name  # name that plans cite it by
    model: ModelSpec  # the model that was measured, as a model file has it
    blocks: tuple[Measured, ...]  # times and memory of the model's blocks
    links: tuple[MeasuredLink, ...]  # latency and bandwidth between chips
    version: int = PROFILE_VERSION  # version of the file format

    @cached_property
    def citation(self) -> str:
        """Its name and a digest of all it says, for the plans made from it."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.name} sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def of(self, chip: str) -> ChipProfile:
        """Returns what was measured of one chip type, which may be nothing."""
        if chip not in self._chips:
            self._chips[chip] = ChipProfile(self, chip)
        return self._chips[chip]

    @cached_property
    def _chips(self) -> dict[str, ChipProfile]:
        return {}

    def link(self, pair: PairKind) -> Link | None:
        """Returns the link between a pair of chips, or None where it was not measured."""
        if pair not in self._links:
            return None
        return Link(self._links[pair].latency_s, self._links[pair].bytes_per_s)

    @cached_property
    def _links(self) -> dict[PairKind, MeasuredLink]:
        return {link.pair: link for link in self.links}


Kind = tuple[bool, bool, int, int]  # of a stage: first, last, tp, sequences


class ChipProfile:
    """What a profile says of one chip type. Everything raises ProfileError for what it does not."""

    def __init__(self, profile: Profile, chip: str) -> None:
        self.name, self.chip = profile.name, chip
        self.found: dict[Kind, dict[int, Measured]] = {}  # by kind and number of layers
        for measured in profile.blocks:
            block = measured.block
            if block.chip == chip:
                kind = block.first, block.last, block.tp, block.sequences
                self.found.setdefault(kind, {})[block.layers] = measured

    def seconds(self, term: str, layers: int, kind: Kind) -> float:
        """Returns the seconds of a stage of any number of layers: the sum over the measured blocks
        that make it up (AutoHet, equation 5).
        """
        blocks = decompose(layers, self._sizes(kind))
        return sum(self._of(term, block, kind) for block in blocks) + self._ends(term, kind)

    def bytes(self, term: str, layers: int, kind: Kind) -> int:
        """Returns the bytes of a stage of any number of layers, on the straight line through the
        smallest and the largest measured block.
        """
        layer = self._layer(term, kind)
        return round(self._of(term, 1, kind) + (layers - 1) * layer + self._ends(term, kind))

    def update_s(self, layers: int, kind: Kind, shards: int) -> float:
        """Returns the seconds of an update whose elements `shards` replicas share; each of them
        still launches all kernels.
        """
        layer_s = self._layer("update_s", kind)
        launches_s = self._of("update_s", 1, kind) - layer_s
        return launches_s + (layers * layer_s + self._ends("update_s", kind)) / shards

    def knows(self, tp: int, sequences: int) -> bool:
        """Whether anything was measured with this degree and so many sequences."""
        return (False, False, tp, sequences) in self.found

    @property
    def library_bytes(self) -> int:
        """Bytes of a rank that the chip's libraries keep for good, such as cuBLAS's workspace."""
        measured = (each for sizes in self.found.values() for each in sizes.values())
        return max((each.library_bytes or 0 for each in measured), default=0)

    def knows_memory(self, kind: Kind) -> bool:
        return self._measured(1, (False, False, *kind[2:])).kept_bytes is not None

    def _ends(self, term: str, kind: Kind) -> float:
        """What the embedding and the head add to one layer."""
        first, last, tp, sequences = kind
        one, ends = self._of(term, 1, kind), 0.0
        if first:
            ends += getattr(self._measured(1, (True, False, tp, sequences)), term) - one
        if last:
            ends += getattr(self._measured(1, (False, True, tp, sequences)), term) - one
        return ends

    def _layer(self, term: str, kind: Kind) -> float:
        """What a layer adds, between the smallest block and the largest."""
        most, one = self._sizes(kind)[-1], self._of(term, 1, kind)
        return (self._of(term, most, kind) - one) / (most - 1) if most > 1 else one

    def _of(self, term: str, layers: int, kind: Kind) -> float:
        """Returns what was measured of a block of layers without embedding and head."""
        value: float = getattr(self._measured(layers, (False, False, *kind[2:])), term)
        return value

    def _sizes(self, kind: Kind) -> list[int]:
        """The blocks that are layers alone, smallest first."""
        return sorted(self.found.get((False, False, *kind[2:]), {1: None}))

    def _measured(self, layers: int, kind: Kind) -> Measured:
        found = self.found.get(kind, {}).get(layers)
        if found is None:
            _, _, tp, sequences = kind
            raise ProfileError(
                f"profile {self.name} does not have chip {self.chip} with tp {tp} and "
                f"{sequences} sequences; heteropp-profile --tp {tp} --sequences {sequences} adds it"
            )
        return found


def decompose(layers: int, sizes: list[int]) -> list[int]:
    """Splits a number of layers into blocks of these sizes, powers of two from 1 on.

    The largest blocks come first.
    """
    blocks: list[int] = []
    for size in reversed(sizes):
        count, layers = divmod(layers, size)
        blocks += [size] * count
    return blocks


def blocks_of(
    chip: str, degrees: Sequence[int], sequences: Sequence[int], layers: int
) -> Iterator[Block]:
    """Yields the blocks that are to be measured of a chip, by degree and sequences, smaller ones
    first.
    """
    for tp, count in itertools.product(degrees, sequences):
        kinds = [(1, True, False), (1, False, True)]
        kinds += [(2**i, False, False) for i in range(layers.bit_length())]
        for size, first, last in sorted(kinds):
            yield Block(chip=chip, tp=tp, sequences=count, layers=size, first=first, last=last)


def pair_kinds(cluster: Cluster) -> dict[PairKind, tuple[int, int]]:
    """Returns every kind of pair in a cluster, each with two ranks that are such a pair."""
    found: dict[PairKind, tuple[int, int]] = {}
    alike: dict[tuple[str, ChipSpec, str], list[Node]] = {}
    for node in cluster.nodes:
        nodes = alike.setdefault((node.chip_name, node.chip, node.place), [])
        if len(nodes) < 2:
            nodes.append(node)
    nodes = [node for two in alike.values() for node in two]
    for a, b in itertools.combinations_with_replacement(nodes, 2):
        ranks = (a.ranks[0], b.ranks[0]) if a is not b else tuple(a.ranks[:2])
        if len(ranks) == 2:
            found.setdefault(pair_kind(cluster, *ranks), (ranks[0], ranks[1]))
    return found


@dataclass(frozen=True)
class MeasuredCluster(Cluster):
    """A cluster as a profile knows it: links that were measured are as measured."""

    profile: Profile | None = None

    __hash__ = Cluster.__hash__

    def link(self, source: int, destination: int) -> Link:
        assert self.profile is not None
        return self.profile.link(pair_kind(self, source, destination)) or super().link(
            source, destination
        )

    def _place(self, node: Node) -> str:
        """Returns the place by whose name links were measured."""
        return node.place

    def route(self, source: int, destination: int) -> Route:
        """The pipes that messages share, and one of the pair's own as fast as was measured."""
        assert self.profile is not None
        route = super().route(source, destination)
        link = self.profile.link(pair_kind(self, source, destination))
        if link is None:
            return route
        own = Pipe(f"rank {source} to rank {destination}", link.bytes_per_s)
        return Route(link.latency_s, (*route.pipes, own))


def measured_cluster(cluster: Cluster, profile: Profile) -> MeasuredCluster:
    given = {field.name: getattr(cluster, field.name) for field in fields(cluster)}
    return MeasuredCluster(**given, profile=profile)


def chip_profile(cluster: Cluster | None, chip: str) -> ChipProfile | None:
    """What to give stage_time and stage_memory for a chip of a cluster; None if not measured."""
    if not isinstance(cluster, MeasuredCluster) or cluster.profile is None:
        return None
    return cluster.profile.of(chip)


def cited_profile(cluster: Cluster) -> str | None:
    """The name and digest of the profile that a plan for this cluster is made from."""
    if not isinstance(cluster, MeasuredCluster) or cluster.profile is None:
        return None
    return cluster.profile.citation


def pair_kind(cluster: Cluster, source: int, destination: int) -> PairKind:
    a, b = cluster.node(source), cluster.node(destination)
    (chip, place), (other_chip, other_place) = sorted(
        ((a.chip_name, a.place), (b.chip_name, b.place))
    )
    return PairKind(chips=(chip, other_chip), places=(place, other_place), same_node=a is b)


def read_profile(path: Path) -> Profile:
    """Raises FileError."""
    profile = read_json(path, Profile)
    if profile.version != PROFILE_VERSION:
        raise FileError(
            f"{path}: version is {profile.version}; this release reads version {PROFILE_VERSION}"
        )
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile atomically. Raises FileError."""
    write_json(path, profile)
