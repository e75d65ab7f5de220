"""HeteroAuto's search space (section 4.3.1): chip types, degrees, and what their stages cost.

A type's stages take its ranks in order. What a stage costs depends on its place only through the
links that its ranks meet, and most of its places are alike.

A stage may cut sequences, if the request lets it: each replica is then several tensor-parallel
groups, one after the other in rank order, in a number that is a power of two. They are of one chip
type, so they take parts of as much work each or, to need less memory, of as many tokens each. And
it may let the experts of a layer lie over its tensor-parallel groups, in equal numbers as nearly as
can be, over a number of groups that is a power of two; groups take turns at them. Of a stage that
cuts sequences each part is a case of its own: experts then lie over as many groups as may be, of
parts of as much work, or not at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from heteropp.cost.communication import NO_LINK
from heteropp.cost.expert_shares import expert_shares
from heteropp.cost.planned import link_inside
from heteropp.cost.tracing.kind import Spread
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link, Node
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.models.spec import ModelError, ModelSpec
from heteropp.search.parts import most_expert_ranks, numbers_of_parts, ways_to_cut
from heteropp.search.planner import Request, SearchError

SUBGROUP = 128  # chips
Widths = tuple[int, int, int]  # the degrees of tensor, context and expert parallelism


class RankKind(NamedTuple):
    """What the time of a rank depends on, beside its stage."""

    cp_index: int  # which part of each sequence it has
    spread: Spread | None  # how experts lie over ranks, of which it is one
    inside: Link  # to its tensor-parallel group
    across: Link  # to those that hold the same slices
    context: Link  # to those among which its sequences are cut
    experts: Link  # to those over which the experts of its rows lie


@dataclass(frozen=True, order=True)
class Degrees:
    """The degrees of tensor, data, context and expert parallelism of a stage."""

    tp: int
    dp: int
    token_shares: tuple[int, ...] = ()  # of a sequence, by group of a replica; empty: it is whole
    expert_shares: tuple[int, ...] = ()  # of a layer, by group of a turn; empty: each has them all

    @property
    def cp(self) -> int:
        return len(self.token_shares) or 1

    @property
    def ep(self) -> int:
        return len(self.expert_shares) or 1

    @property
    def widths(self) -> Widths:
        return self.tp, self.cp, self.ep

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same slices."""
        return self.dp * self.cp

    @property
    def chips(self) -> int:
        return self.tp * self.copies

    def spread(self, group: int) -> Spread | None:
        """Returns how experts lie over the turn of a tensor-parallel group of the stage."""
        if not self.expert_shares:
            return None
        first = group // self.ep * self.ep
        tokens = self.token_shares or (1,)
        rows = [tokens[(first + i) % self.cp] for i in range(self.ep)]
        return Spread.of(self.expert_shares, rows, group - first)


@dataclass(frozen=True)
class ChipGroup:
    """Chips of one type, in rank order, that have degrees of their own."""

    type_index: int
    start: int  # its first chip, of those of its type
    chips: int


@dataclass(frozen=True)
class StageChoice:
    """A stage of a plan that is being searched: all but its ranks."""

    type_index: int
    degrees: Degrees
    recompute: bool
    layers: int


class ChipType:
    """All chips of one type, in rank order."""

    def __init__(self, cluster: Cluster, name: str, model: ModelSpec) -> None:
        self.cluster = cluster
        self.name = name
        self.nodes = [node for node in cluster.nodes if node.chip_name == name]
        self.ranks = range(self.nodes[0].ranks.start, self.nodes[-1].ranks.stop)
        self.chip: ChipSpec = self.nodes[0].chip
        self.tp_degrees = self._tp_degrees(model)
        self._rank_kinds: dict[tuple[int, Degrees], tuple[RankKind, ...]] = {}

    @property
    def chips(self) -> int:
        return len(self.ranks)

    @cached_property
    def runs(self) -> tuple[tuple[Node, int], ...]:
        """Nodes that are alike, and how many follow each other: a short name for all of them."""
        bare = (replace(node, name="", ranks=range(len(node.ranks))) for node in self.nodes)
        return tuple((node, len(list(alike))) for node, alike in groupby(bare))

    def _tp_degrees(self, model: ModelSpec) -> list[int]:
        """Powers of two up to TP_MAX that divide the nodes and the model."""
        chips = math.gcd(*(len(node.ranks) for node in self.nodes))
        return [tp for tp in model.tp_degrees(self.chip.tp_limit) if chips % tp == 0]

    @cached_property
    def _kinds(self) -> list[int]:
        """A number for each node, the same for nodes alike in all that links depend on."""
        return [
            kind
            for kind, node in zip(self.cluster.node_kinds, self.cluster.nodes, strict=True)
            if node.chip_name == self.name
        ]

    @cached_property
    def _alike(self) -> bool:
        return len(set(self._kinds)) == 1

    @cached_property
    def _starts(self) -> list[int]:
        """Where each node begins, counted in chips of this type."""
        return [node.ranks.start - self.ranks.start for node in self.nodes]

    def stage_rank_kinds(
        self, group: ChipGroup, degrees: Degrees, align: int
    ) -> list[tuple[RankKind, ...]]:
        """Returns the kinds of ranks of a stage that starts at each multiple of `align` in a group.

        Later starts repeat the list.
        """
        stop = group.chips - degrees.chips + 1
        if self._alike:
            stop = min(stop, math.lcm(len(self.nodes[0].ranks), align))
        return [self.rank_kinds(group.start + at, degrees) for at in range(0, stop, align)]

    def rank_kinds(self, start: int, degrees: Degrees) -> tuple[RankKind, ...]:
        """Returns the unlike kinds of ranks of a stage.

        start: the stage's first chip, counted in chips of this type.
        """
        if self._alike:  # so it is the same wherever it starts in a node
            start %= len(self.nodes[0].ranks)
        key = (start, degrees)
        if key not in self._rank_kinds:
            self._rank_kinds[key] = tuple(dict.fromkeys(self._find_rank_kinds(start, degrees)))
        return self._rank_kinds[key]

    def _find_rank_kinds(self, start: int, degrees: Degrees) -> Iterator[RankKind]:
        tp, cp, ep, stop = *degrees.widths, start + degrees.chips
        nodes, again = self._nodes_of(start, stop), tp * math.lcm(cp, ep)
        if self._alike:  # after so many nodes replicas and turns lie as before
            period = again // math.gcd(again, len(self.nodes[0].ranks))
            if len(nodes) > period + 3:
                nodes = [*nodes[: period + 2], nodes[-1]]
        groups = self._groups_on(nodes, start, stop, tp)
        for node, count in groups.items():
            inside = link_inside(self.cluster, self.nodes[node], tp) if tp > 1 else NO_LINK
            across = self._slowest_link(node, groups)
            first = (max(start, self._starts[node]) - start) // tp
            alike = again == tp
            for number in range(first, first + (1 if alike else count)):
                context, experts = (
                    self._link_of_block(node, start + number // size * size * tp, size, tp)
                    for size in (cp, ep)
                )
                spread = degrees.spread(number)
                yield RankKind(number % cp, spread, inside, across, context, experts)

    def _link_of_block(self, node: int, start: int, size: int, tp: int) -> Link:
        """Returns the slowest link of a rank on a node in so many groups that follow each other."""
        if size == 1:
            return NO_LINK
        stop = start + size * tp
        return self._slowest_link(
            node, self._groups_on(self._nodes_of(start, stop), start, stop, tp)
        )

    def _nodes_of(self, start: int, stop: int) -> Sequence[int]:
        """Returns the nodes of the chips [start, stop)."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop) - 1
        return range(first, last + 1)

    def _groups_on(self, nodes: Sequence[int], start: int, stop: int, tp: int) -> dict[int, int]:
        """Returns how many tensor-parallel groups of the chips [start, stop) some nodes have."""
        groups = {}
        for node in nodes:
            begin, size = self._starts[node], len(self.nodes[node].ranks)
            groups[node] = (min(stop, begin + size) - max(start, begin)) // tp
        return groups

    def _slowest_link(self, node: int, groups: dict[int, int]) -> Link:
        """Returns the slowest link of a rank on a node to its peers, one in each of some groups.

        Of several slowest links the first in rank order is taken. groups: their number by node.
        """
        own = self.nodes[node]
        if len(groups) == 1:
            return link_inside(self.cluster, own, groups[node]) if groups[node] > 1 else NO_LINK
        links: dict[tuple[int, bool], Link] = {}
        for other in groups:
            kind = (self._kinds[other], other == node)
            if other == node and groups[node] > 1:
                links[kind] = self.cluster.link(own.ranks.start, own.ranks.start + 1)
            elif other != node and kind not in links:
                links[kind] = self.cluster.link(own.ranks.start, self.nodes[other].ranks.start)
        return min(links.values(), key=lambda link: link.bytes_per_s, default=NO_LINK)


@dataclass(frozen=True)
class BatchCut:
    """One way to cut the global batch: a micro-batch of `replicas` x `sequences` sequences."""

    replicas: int  # most that a stage may have
    sequences: int  # least that a replica takes of a micro-batch
    micro_batches: int


class Space:
    """What a request may choose from."""

    def __init__(
        self,
        request: Request,
        order: Sequence[str] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        """order: the chip types from the first stages on, larger memory first if absent.

        sequence_parallel: stages of several tensor-parallel ranks cut rows, too.
        """
        self.request = request
        self.model = request.model
        self.sequence_parallel = sequence_parallel
        names = order or request.cluster.chip_names()
        self.types = [ChipType(request.cluster, name, request.model) for name in names]

    @cached_property
    def groupings(self) -> list[list[ChipGroup]]:
        """The ways to group chips: each type whole and, if some are large, by SUBGROUP chips.

        These are the two stages of section 4.3.3. Where every stage is free to choose its degrees
        and layers, nothing is cut.
        """
        whole = [ChipGroup(index, 0, chips.chips) for index, chips in enumerate(self.types)]
        cut = [
            ChipGroup(group.type_index, start, min(SUBGROUP, group.chips - start))
            for group in whole
            for start in range(0, group.chips, SUBGROUP)
        ]
        free = self.request.uneven_layers and self.request.stage_degrees
        if free or not len(whole) < len(cut) <= self.model.layers:
            return [whole]
        return [whole, cut]

    @cached_property
    def shares(self) -> list[BatchCut]:
        """The data-parallel degrees (sizes of a micro-batch) with which all chips are used.

        There is at least one. Raises SearchError otherwise.
        """
        request = self.request
        if request.global_batch % request.sequences:
            raise SearchError(
                f"global batch {request.global_batch} is not a multiple of the "
                f"{request.sequences} sequences of a micro-batch in each replica"
            )
        slots = request.global_batch // request.sequences
        counts = [chips.chips for chips in self.types]
        most = min(slots, max(counts) if request.stage_degrees else min(counts))
        shares = [
            BatchCut(replicas, request.sequences, slots // replicas)
            for replicas in range(1, most + 1)
            if slots % replicas == 0
        ]
        found = [share for share in shares if any(self.uses_all(g, share) for g in self.groupings)]
        if not found:
            raise self.no_degrees()
        return found

    @cached_property
    def _cuts(self) -> dict[int, list[tuple[int, ...]]]:
        """The ways to cut sequences, by tensor-parallel degree; the first is not to cut them."""
        cuts: dict[int, list[tuple[int, ...]]] = {}
        numbers = numbers_of_parts(self.request, self.request.context_parallel or 1)
        for tp in {tp for chips in self.types for tp in chips.tp_degrees}:
            for cp in numbers:
                with suppress(ModelError):  # sequences are too short for so many parts
                    ways = ways_to_cut(self.model, cp, tp)
                    ends = (shares or () for shares in (ways[0], ways[-1]))
                    cuts.setdefault(tp, []).extend(dict.fromkeys(ends))
        return cuts

    def _spreads(self, degrees: Degrees) -> list[tuple[int, ...]]:
        """Returns the ways to spread experts over groups; the first is not to spread them."""
        found = [shares for n, shares in self._even_shares.items() if degrees.copies % n == 0]
        if degrees.cp > 1:
            by_work = ways_to_cut(self.model, degrees.cp, degrees.tp)[0]
            found = found[-1:] if degrees.token_shares == by_work else []
        return [(), *found]

    @cached_property
    def _even_shares(self) -> dict[int, tuple[int, ...]]:
        """The experts of each of so many groups that are alike, by their number."""
        most = most_expert_ranks(self.request, self.request.expert_parallel or 1)
        degrees = (1 << n for n in range(1, most.bit_length()))
        return {n: expert_shares(self.model, (1.0,) * n) for n in degrees}

    def degrees(self, group: ChipGroup, share: BatchCut) -> list[Degrees]:
        """Returns the degrees that a stage of a group may have, fewest chips first, then tp."""
        dps = [share.replicas]
        if self.request.stage_degrees:
            dps = [dp for dp in range(1, share.replicas + 1) if share.replicas % dp == 0]
        tps = self.types[group.type_index].tp_degrees
        found = (
            Degrees(tp, dp, tokens, experts)
            for tp in tps
            for dp in dps
            for tokens in self._cuts[tp]
            for experts in self._spreads(Degrees(tp, dp, tokens))
        )
        return sorted((d for d in found if self._may_use(group, d)), key=lambda d: (d.chips, d.tp))

    def _may_use(self, group: ChipGroup, degrees: Degrees) -> bool:
        if self.request.stage_degrees:
            return degrees.chips <= group.chips
        stages, rest = divmod(group.chips, degrees.chips)
        return rest == 0 and 1 <= stages <= self.model.layers

    def uses_all(self, groups: list[ChipGroup], share: BatchCut) -> bool:
        """Whether some degrees use all chips in at most as many stages as there are layers."""
        degrees = [self.degrees(group, share) for group in groups]
        if not all(degrees):
            return False
        if self.request.stage_degrees:
            return True  # the search itself finds out
        least = sum(
            group.chips // max(d.chips for d in own)
            for group, own in zip(groups, degrees, strict=True)
        )
        return least <= self.model.layers

    def no_degrees(self) -> SearchError:
        slots = self.request.global_batch // self.request.sequences
        counts = ", ".join(f"{chips.chips} of chip {chips.name}" for chips in self.types)
        layers = (
            "each stage holds at least one"
            if self.request.uneven_layers
            else "a type's stages hold the same number"
        )
        degrees = "tp x dp x cp" if (self.request.context_parallel or 1) > 1 else "tp x dp"
        return SearchError(
            f"no degrees use all chips ({counts}): each count must be stages x {degrees}, dp must "
            f"divide {slots}, and {layers} of the {self.model.layers} layers"
        )

    def plan(self, share: BatchCut, stages: Sequence[StageChoice]) -> Plan:
        """Returns the plan of these stages, first to last, on all ranks of each type in order."""
        micro_batch = share.replicas * share.sequences
        made = list(self._stages(micro_batch, stages))
        return Plan(
            model=self.model,
            global_batch=self.request.global_batch,
            micro_batch=micro_batch,
            schedule=self.request.schedule,
            zero_stage=self.request.zero_stage,
            optimizer=self.request.optimizer,
            pipelines=(Pipeline(micro_batches=share.micro_batches, stages=tuple(made)),),
        )

    def _stages(self, micro_batch: int, stages: Iterable[StageChoice]) -> Iterator[Stage]:
        layer, begins = 0, [chips.ranks.start for chips in self.types]
        for stage in stages:
            tp, dp, cp = stage.degrees.tp, stage.degrees.dp, stage.degrees.cp
            rank = begins[stage.type_index]
            begins[stage.type_index] += stage.degrees.chips
            firsts = range(rank, rank + stage.degrees.chips, tp * cp)
            yield Stage(
                layers=(layer, layer + stage.layers),
                recompute=stage.recompute,
                sequence_parallel=self.sequence_parallel and tp > 1,
                expert_shares=stage.degrees.expert_shares or None,
                expert_capacity=(
                    self.request.expert_capacity if stage.degrees.expert_shares else None
                ),
                replicas=tuple(
                    Replica(
                        ranks=tuple(range(first, first + tp * cp)),
                        chip=self.types[stage.type_index].name,
                        batch_share=micro_batch // dp,
                        token_shares=stage.degrees.token_shares or None,
                    )
                    for first in firsts
                ),
            )
            layer += stage.layers
