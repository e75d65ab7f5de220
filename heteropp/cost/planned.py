"""The cost of every rank of a plan on a cluster: seconds, bytes, and whether it fits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

from heteropp.cost.communication import NO_LINK
from heteropp.cost.memory_walk import MemoryWalk
from heteropp.cost.stage_time import Memory, StageShape, Time, over_slices, stage_time
from heteropp.cost.tracing.kind import Spread
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link, Node
from heteropp.description.plan import (
    Pipeline,
    Plan,
    PlanError,
    Stage,
    ministage_layers,
)
from heteropp.description.profile import ChipProfile, chip_profile
from heteropp.description.sections import turn_of, turns
from heteropp.models.spec import ModelSpec
from heteropp.optimizer.replicated_gradients import Exchange, exchanges
from heteropp.schedule.action import Action
from heteropp.schedule.inboxes import received_ahead
from heteropp.schedule.stage_actions import coded_table, links, table_key
from hyperhetero.remembered import Remembered


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raises PlanError when the plan's ranks are not the cluster's chips."""
    if plan.world_size != cluster.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} ranks and cluster {cluster.name} {cluster.world_size}"
        )
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for replica in stage.replicas:
                for rank in replica.ranks:
                    expected, found = plan.chip(rank), cluster.node(rank).chip_name
                    if found != expected:
                        raise PlanError(
                            f"pipelines[{p}].stages[{s}] expects chip {expected} at rank "
                            f"{rank}; cluster {cluster.name} has {found} there"
                        )


def rank_times(plan: Plan, cluster: Cluster) -> list[Time]:
    """Predicted seconds, by rank."""
    times: dict[int, Time] = {}
    links_of = links_by_rank(plan, cluster)
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        alike: dict[Hashable, Time] = {}
        of_ranks = [(rank, kind) for ranks, kind in _kinds_of_groups(plan, stage) for rank in ranks]
        for rank, kind in of_ranks:
            key = kind, links_of[rank]
            if key not in alike:
                node, shape = cluster.node(rank), stage_shape(plan, rank)
                profile = chip_profile(cluster, node.chip_name)
                alike[key] = over_slices(
                    [
                        _stage_time(plan.model, at, node.chip, links_of[rank], profile)
                        for at in shape.slices
                    ]
                )
            times[rank] = alike[key]
    return [times[rank] for rank in range(plan.world_size)]


def _kinds_of_groups(plan: Plan, stage: Stage) -> Iterator[tuple[tuple[int, ...], Hashable]]:
    """Yields a stage's tensor-parallel groups, each with what its ranks' shape depends on."""
    spread = stage.expert_shares is not None
    for replica in stage.replicas:
        kind = replica.kind
        for cp_index in range(replica.cp):
            group = replica.group(cp_index)
            yield group, (kind, cp_index, spread_of(plan, group[0]) if spread else None)


def _stage_time(
    model: ModelSpec,
    shape: StageShape,
    chip: ChipSpec,
    links: GroupLinks,
    profile: ChipProfile | None,
    pairs_apart: bool = False,
) -> Time:
    return stage_time(
        *(model, shape, chip, links.inside, links.across, profile),
        context=links.context,
        pairs_apart=pairs_apart,
        experts=links.experts,
    )


def ministage_times(
    plan: Plan,
    cluster: Cluster,
    rank: int,
    spans: Iterable[tuple[int, int]],
    links: GroupLinks,
    pairs_apart: bool = False,
    twice_the_rows: bool = False,
) -> list[tuple[Time, ...]]:
    """Returns, for each span of layers [first, last), the times of a rank's stage if it held that
    span alone: one for each slice, or one for whole sequences.

    pairs_apart: see stage_time. twice_the_rows: as if so many came to its experts.
    """
    chip = cluster.chip(rank)
    profile = chip_profile(cluster, cluster.node(rank).chip_name)
    shape = stage_shape(plan, rank)
    if shape.spread is not None and twice_the_rows:
        shape = replace(shape, spread=shape.spread.with_more_rows(Fraction(2)))
    alike: dict[Hashable, tuple[Time, ...]] = {}  # most spans are
    found = []
    for span in spans:
        kind = _kind_of_span(plan.model, span)
        if kind not in alike:
            slices = shape.holding(plan.model, span).slices
            alike[kind] = tuple(
                [_stage_time(plan.model, at, chip, links, profile, pairs_apart) for at in slices]
            )
        found.append(alike[kind])
    return found


def _kind_of_span(model: ModelSpec, span: tuple[int, int]) -> Hashable:
    """Returns all that a rank's shape depends on of the layers [first, last) that it holds."""
    first, last = span
    return first == 0, last == model.layers, model.block_counts([span])


class StageWork(NamedTuple):
    """What the times of a stage's ministages depend on, beside chips and links."""

    stage: Stage
    held: tuple[tuple[int, int], ...]  # the layers of each ministage
    like: Hashable  # what of the plan all its stages depend on


def stage_works(plan: Plan, pipeline: Pipeline) -> list[StageWork]:
    """Returns the work of each stage of a pipeline."""
    like = plan.model, plan.schedule, plan.zero_stage, plan.optimizer, pipeline.token_slices
    spans = ministage_layers(pipeline, plan.schedule)
    pairs = zip(pipeline.stages, spans, strict=True)
    return [StageWork(stage, held, like) for stage, held in pairs]


def rank_memory(plan: Plan, cluster: Cluster | None = None) -> list[Memory]:
    """Predicted peak bytes, by rank; the cluster may be a measured one."""
    chips = {chip for p in plan.pipelines for stage in p.stages for chip in stage.chips}
    profiles = tuple((chip, chip_profile(cluster, chip)) for chip in sorted(chips))
    return list(_rank_memory(replace(plan, profile=None, prediction=None), profiles))


_peaks: Remembered[Memory] = Remembered(4096)  # a search asks for the same stage in many plans


@lru_cache(maxsize=64)
def _rank_memory(
    plan: Plan, profiles: tuple[tuple[str, ChipProfile | None], ...]
) -> tuple[Memory, ...]:
    """A search asks for a plan's memory again and again: to choose, to relax and to predict it."""
    profile_of = dict(profiles)
    memory: dict[int, Memory] = {}
    copies = exchanges(plan)
    for pipeline in plan.pipelines:
        places = _walked_places(plan, pipeline)
        for stage, place in zip(pipeline.stages, places, strict=True):
            alike: dict[tuple, Memory] = {}
            differ = bool(copies) or plan.optimizer == "muon"
            for group, kind in _kinds_of_groups(plan, stage):
                for ranks in [(rank,) for rank in group] if differ else [group]:
                    rank = ranks[0]
                    own = rank_share(plan, rank, stage.ministages, copies)
                    key = kind, own
                    if key not in alike:
                        profile, shape = profile_of[plan.chip(rank)], stage_shape(plan, rank)
                        whole = (plan.model, shape, plan.resharding, profile, own, place)
                        alike[key] = _peaks.get(whole, partial(_peak, plan, rank, profile))
                    memory.update(dict.fromkeys(ranks, alike[key]))
    return tuple(memory[rank] for rank in range(plan.world_size))


def rank_share(
    plan: Plan, rank: int, ministages: int, copies: Mapping[tuple[int, int], Exchange]
) -> Hashable:
    """Returns what makes the memory of one rank unlike that of others in replicas of its kind.

    That is its shard of Muon's state, which has larger tensors in some shards than in others, and,
    by ministage, the gradients that it exchanges. copies: the plan's exchanges().
    """
    shard = plan.shard(rank)[0] if plan.optimizer == "muon" else 0
    return shard, tuple([copies.get((rank, k)) for k in range(ministages)])


def _walked_places(plan: Plan, pipeline: Pipeline) -> list[Hashable]:
    """Returns, by stage, what the memory of a rank depends on beyond its own stage's shape."""
    ahead: list[list[tuple]] = [[] for _ in pipeline.stages]
    for (s, k, kind), count in received_ahead(plan.schedule, pipeline).items():
        ahead[s].append((kind, k, count))
    spans = ministage_layers(pipeline, plan.schedule)
    between = links(plan.schedule, pipeline)
    return [
        (
            table_key(plan.schedule, pipeline, s, plan.overlap),
            tuple(ahead[s]),
            tuple(_kind_of_span(plan.model, span) for span in spans[s]),
            tuple((k, j) for (a, k), (b, j) in between if a == b == s),
        )
        for s in range(len(pipeline.stages))
    ]


def _peak(plan: Plan, rank: int, profile: ChipProfile | None) -> Memory:
    return _walk(plan, rank, profile).peak()


def memory_walk(
    plan: Plan, rank: int, cluster: Cluster | None, table: Sequence[Action] | None = None
) -> MemoryWalk:
    """Returns the memory walk of a rank; table: its actions, where they are not the plan's."""
    return _walk(plan, rank, chip_profile(cluster, plan.chip(rank)), table)


def whole_sequences_memory(plan: Plan, rank: int, cluster: Cluster) -> Memory:
    """Returns what a rank of a replica that cuts sequences would need, if it had as many tokens at
    once in whole sequences, or one where that is more.
    """
    shape, (p, s, *_) = stage_shape(plan, rank), plan.place(rank)
    sequences = -(-shape.sequences // plan.pipelines[p].stages[s].cp)
    whole = replace(shape, sequences=sequences, token_shares=None, cp_index=0, spread=None)
    return _walk(plan, rank, chip_profile(cluster, plan.chip(rank)), shape=whole).peak()


def _walk(
    plan: Plan,
    rank: int,
    profile: ChipProfile | None,
    table: Sequence[Action] | None = None,
    shape: StageShape | None = None,
) -> MemoryWalk:
    p, s, _, _ = plan.place(rank)
    if table is None:
        coded = coded_table(table_key(plan.schedule, plan.pipelines[p], s, plan.overlap))
    else:
        coded = tuple(action.coded for action in table)
    return MemoryWalk(plan, rank, shape or stage_shape(plan, rank), coded, profile)


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def stage_shape(plan: Plan, rank: int) -> StageShape:
    p, s, r, _ = plan.place(rank)
    pipeline = plan.pipelines[p]
    stage, slices = pipeline.stages[s], pipeline.token_slices
    held = ministage_layers(pipeline, plan.schedule)[s]
    replica = stage.replicas[r]
    return StageShape(
        layers=sum(last - first for first, last in held),
        first=any(first == 0 for first, _ in held),
        last=any(last == plan.model.layers for _, last in held),  # a V ends where it began
        tp=stage.tp,
        dp=stage.copies,
        sequences=replica.batch_share,
        zero_stage=plan.zero_stage,
        optimizer=plan.optimizer,
        recompute=stage.recompute,
        ministages=stage.ministages,
        schedule=plan.schedule,
        offload=stage.offload,
        sequence_parallel=stage.sequence_parallel,
        selective_recompute=stage.selective_recompute,
        blocks=plan.model.block_counts(held),
        token_shares=slices or replica.token_shares,
        cp_index=plan.cp_index(rank),
        sliced=slices is not None,
        spread=spread_of(plan, rank),
        expert_capacity=stage.expert_capacity,
    )


def spread_of(plan: Plan, rank: int) -> Spread | None:
    """Returns how experts lie over the ranks of a rank's turn; None without expert parallelism."""
    p, s, r, _ = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    if stage.expert_shares is None:
        return None
    group = r * stage.cp + plan.cp_index(rank)  # of the stage's
    first = group // stage.ep * stage.ep
    rows = [
        replica.batch_share * tokens
        for replica in stage.replicas
        for tokens in replica.token_shares or (plan.model.sequence_length,)
    ][first : first + stage.ep]
    return Spread.of(stage.expert_shares, rows, group - first)


class GroupLinks(NamedTuple):
    """The slowest links of a rank in each of its groups."""

    inside: Link  # its tensor-parallel group
    across: Link  # to those that hold the same slices
    context: Link  # to those among which the replica's sequences are cut
    experts: Link  # to those over which the experts of its rows lie


def group_links(plan: Plan, cluster: Cluster, rank: int) -> GroupLinks:
    p, s, r, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    inside = stage.replicas[r].group(plan.cp_index(rank))
    across = _peers(stage, tp_index)
    context = stage.replicas[r].across(tp_index)
    groups = (inside, across, context, turn_of(stage, tp_index, rank))
    return GroupLinks(*(slowest_link(cluster, rank, group) for group in groups))


def links_by_rank(plan: Plan, cluster: Cluster) -> dict[int, GroupLinks]:
    """Returns the group_links of every rank of a plan."""
    found: dict[int, GroupLinks] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        tp_indices = range(stage.tp)
        across = [_peers(stage, i) for i in tp_indices]
        context = [replica.across(i) for replica in stage.replicas for i in tp_indices]
        experts = [turn for i in tp_indices for turn in turns(stage, i)]
        by_kind = [
            _links_in(cluster, groups) for groups in (stage.groups, across, context, experts)
        ]
        found |= {
            rank: GroupLinks(*(links.get(rank, NO_LINK) for links in by_kind))
            for group in stage.groups
            for rank in group
        }
    return found


def _links_in(cluster: Cluster, groups: Sequence[Sequence[int]]) -> dict[int, Link]:
    """Returns the slowest_link of every rank of some groups, but of those that are alone."""
    found: dict[int, Link] = {}
    known: dict[tuple[int, ...], list[Link]] = {}  # by the nodes of a group's ranks
    for group in groups:
        if len(group) == 1:
            continue
        nodes = tuple([cluster.node_index(rank) for rank in group])
        if nodes not in known:
            links = slowest_links(cluster, group)
            known[nodes] = [links[rank] for rank in group]
        found.update(zip(group, known[nodes], strict=True))
    return found


def _peers(stage: Stage, tp_index: int) -> tuple[int, ...]:
    """Returns the ranks that hold the same slices, in the order of the replicas."""
    return tuple(rank for r in stage.replicas for rank in r.across(tp_index))


def slowest_link(cluster: Cluster, rank: int, group: Sequence[int]) -> Link:
    """Returns what a collective of a group meets at one of its ranks: inside a node what was
    measured of such, and else the slowest link; of equally slow ones, that to the earliest peer.
    """
    if len(group) == 1:
        return NO_LINK
    return _PeersByNode(cluster, group).slowest(cluster.node_index(rank), rank)


def slowest_links(cluster: Cluster, group: Sequence[int]) -> dict[int, Link]:
    """Returns the slowest_link of every rank of a group."""
    if len(group) == 1:
        return {group[0]: NO_LINK}
    nodes = {cluster.node_index(rank) for rank in group}
    if len(nodes) == 1:
        return dict.fromkeys(group, link_inside(cluster, cluster.nodes[nodes.pop()], len(group)))
    found: dict[int, Link] = {}
    peers = _PeersByNode(cluster, group)
    for n, ranks in peers.ranks_of.items():
        if len(ranks) == 1:
            found[ranks[0]] = peers.slowest_of_only(n)
            continue
        found |= dict.fromkeys(ranks, peers.slowest(n, ranks[-1]))
        found[ranks[0]] = peers.slowest(n, ranks[0])
    return found


def link_inside(cluster: Cluster, node: Node, ranks: int) -> Link:
    """Returns what a collective of so many ranks meets, all of them chips of one node.

    That is what was measured of such, and else the link between two of the node's chips.
    """
    first = node.ranks.start
    return collective_link(node.chip, ranks) or cluster.link(first, first + 1)


def collective_link(chip: ChipSpec, ranks: int) -> Link | None:
    """Returns what a collective of so many chips of a node meets, where the chip's file says it."""
    if chip.collectives is None:
        return None
    return Link(chip.collectives.latency_s, chip.collectives.group_bytes_per_s(ranks))


class _PeersByNode:
    """Ranks by node. A node has one link to all nodes that are attached alike, so it asks for one
    of each kind.
    """

    def __init__(self, cluster: Cluster, group: Sequence[int]) -> None:
        self.cluster, self.group = cluster, group
        self.ranks_of: dict[int, list[int]] = {}  # by node, in the group's order
        for rank in group:
            self.ranks_of.setdefault(cluster.node_index(rank), []).append(rank)
        self.kinds: dict[Hashable, list[int]] = {}  # nodes
        for n in self.ranks_of:
            self.kinds.setdefault(self._kind(n), []).append(n)
        self.place_of = {rank: place for place, rank in enumerate(group)}
        self.known: dict[Hashable, Link] = {}  # of nodes with one rank

    def _kind(self, n: int) -> Hashable:
        """How a node is attached to others; of its chip, links may have been measured."""
        node = self.cluster.nodes[n]
        nic = node.nic_share_bytes_per_s, node.chip.links.nic_latency_s
        return *nic, node.place, node.chip_name

    def slowest_of_only(self, n: int) -> Link:
        """Returns the slowest link of the only rank on node n, of others of a group of several.

        Nodes of a kind ask the same peers, but for the one that is asked for its kind.
        """
        kind = self._kind(n)
        key = kind, self.kinds[kind][0] == n
        if key not in self.known:
            self.known[key] = self.slowest(n, self.ranks_of[n][0])
        return self.known[key]

    def slowest(self, n: int, rank: int) -> Link:
        """Returns the slowest link of a rank, which is on node n."""
        cluster, mates = self.cluster, self.ranks_of.get(n, [])
        if 1 < len(self.group) == len(mates):
            return link_inside(cluster, cluster.nodes[n], len(mates))
        others = [next((m for m in nodes if m != n), n) for nodes in self.kinds.values()]
        peers = [self.ranks_of[m][0] for m in others if m != n]
        peers += [mate for mate in mates[:2] if mate != rank][:1]
        links = [cluster.link(rank, p) for p in sorted(peers, key=self.place_of.__getitem__)]
        return min(links, key=lambda link: link.bytes_per_s, default=NO_LINK)
