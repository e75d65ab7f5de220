"""The independent truth for the exact planner: every plan of its space, one after another.

Shares no code with heteropp/search. Plans are written down stage by stage, each stage is costed
with heteropp.cost.stage_time on its own ranks, and section 4.3.2's formula is applied to the whole.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from clusters import random_chip, tiny_model
from invented import ModelOfExperts

from heteropp.cost.planned import slowest_link
from heteropp.cost.stage_time import StageShape, stage_memory, stage_time
from heteropp.cost.token_shares import token_shares
from heteropp.cost.tracing.kind import Spread
from heteropp.description.chips import Collectives
from heteropp.description.cluster import Cluster, Node
from heteropp.description.fabric import Fabric, LinkEntry
from heteropp.description.plan import Pipeline, Plan, Stage
from heteropp.schedule.in_flight import in_flight
from heteropp.search import space
from heteropp.search.planner import Request

ALPHA = {"1f1b": 1.0, "gpipe": 1.0, "zb-h1": 1 / 3}


@dataclass(frozen=True)
class One:
    """A stage, written down."""

    type_index: int
    start: int  # its first rank
    tp: int
    dp: int
    layers: int
    recompute: bool
    token_shares: tuple[int, ...] = ()  # of each replica's tensor-parallel groups; empty: one group
    expert_shares: tuple[int, ...] = ()  # of the stage's groups, in turn; empty: each has all

    @property
    def chips(self) -> int:
        return self.tp * self.dp * max(1, len(self.token_shares))


class BruteForce:
    def __init__(self, request: Request) -> None:
        self.request, self.cluster, self.model = request, request.cluster, request.model
        self.names = self.cluster.chip_names()
        self.cut = False  # whether chip types are cut into groups of space.SUBGROUP chips
        self.evaluated: dict = {}
        self.ways: dict[int, list[tuple[int, ...]]] = {}  # to cut sequences, by tp
        self.for_work: set[tuple[int, tuple[int, ...]]] = set()  # those for equal work, with tp
        self.plans = self.overruns = 0  # how many plans there are, and how many do not fit

    def best(self) -> float | None:
        """The least cost of a plan that fits; None where none does. `plans` counts all."""
        costs = []
        counts = [len(self.cluster.ranks_of(name)) for name in self.names]
        groups = sum(-(-count // space.SUBGROUP) for count in counts)
        for self.cut in (False, True):
            if not self.cut or len(counts) < groups <= self.model.layers:
                costs += [self.cost_s(*each) for each in self.every_plan()]
        self.plans, self.overruns = len(costs), costs.count(None)
        return min((cost for cost in costs if cost is not None), default=None)

    def every_plan(self) -> Iterator[tuple[int, tuple[One, ...]]]:
        """Replicas' slots in a micro-batch, and stages."""
        request = self.request
        slots = request.global_batch // request.sequences
        if request.global_batch % request.sequences:
            return
        counts = [len(self.cluster.ranks_of(name)) for name in self.names]
        most = max(counts) if request.stage_degrees else min(counts)
        for replicas in range(1, min(slots, most) + 1):
            if slots % replicas == 0:
                for stages in self.chains(replicas, 0, 0, self.model.layers):
                    yield replicas, stages

    def chains(
        self, replicas: int, type_index: int, used: int, layers: int, own: tuple[One, ...] = ()
    ) -> Iterator[tuple[One, ...]]:
        """Every chain of stages from a chip of a type on; `own` are the type's stages so far."""
        if type_index == len(self.names):
            if layers == 0:
                yield ()
            return
        ranks = self.cluster.ranks_of(self.names[type_index])
        if used == len(ranks):
            yield from self.chains(replicas, type_index + 1, 0, layers)
            return
        for stage in self.stages(replicas, type_index, used, layers):
            if self.agree((*own, stage)):
                more = used + stage.chips
                for rest in self.chains(
                    replicas, type_index, more, layers - stage.layers, (*own, stage)
                ):
                    yield (stage, *rest)

    def stages(self, replicas: int, type_index: int, used: int, layers: int) -> Iterator[One]:
        ranks = self.cluster.ranks_of(self.names[type_index])
        limit = self.cluster.chip(ranks[0]).tp_limit
        nodes = {len(self.cluster.node(rank).ranks) for rank in ranks}
        for tp in (1, 2, 4, 8):
            if tp > limit or any(size % tp for size in nodes) or self.model.kv_heads % tp:
                continue
            if used % tp:  # its tensor-parallel groups would straddle nodes
                continue
            for dp in range(1, replicas + 1):
                if dp != replicas and not (self.request.stage_degrees and replicas % dp == 0):
                    continue
                for cut, held, recompute in itertools.product(
                    self.cuts(tp), range(1, layers + 1), (False, True)
                ):
                    stage = One(type_index, ranks[used], tp, dp, held, recompute, cut)
                    if used + stage.chips <= len(ranks):
                        for shares in self.spreads(stage.chips // tp, tp, cut):
                            yield replace(stage, expert_shares=shares)

    def cuts(self, tp: int) -> list[tuple[int, ...]]:
        """Sequences whole, or cut for equal work, or for equal numbers of tokens."""
        if tp not in self.ways:
            found: dict[tuple[int, ...], None] = {(): None}
            length = self.model.sequence_length
            for parts in (2, 4, 8):
                if parts > (self.request.context_parallel or 1) or parts * tp > length:
                    continue
                work = token_shares(self.model, [1.0] * parts, tp)
                self.for_work.add((tp, work))
                even = length // parts  # lengths are multiples of all parts and degrees here
                found |= dict.fromkeys([work, (even,) * parts])
            self.ways[tp] = list(found)
        return self.ways[tp]

    def spreads(self, groups: int, tp: int, cut: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Experts on every group, or over some in turn, the first of which have one more; where
        sequences are cut, which is then for equal work, over as many as may be.
        """
        if cut and (tp, cut) not in self.for_work:
            return [()]
        count, found = self.model.expert_count, []
        for degree in (2, 4, 8):
            if degree <= min(self.request.expert_parallel or 1, count) and groups % degree == 0:
                each, more = divmod(count, degree)
                found.append(tuple(each + (i < more) for i in range(degree)))
        return [(), *(found[-1:] if cut else found)]

    def agree(self, own: tuple[One, ...]) -> bool:
        """Whether the stages of one type are as alike as the request wants them."""
        if not self.cut:
            return self.alike(own)
        groups: dict[int, list[One]] = {}
        for stage in own:
            start = stage.start - own[0].start
            if start // space.SUBGROUP != (start + stage.chips - 1) // space.SUBGROUP:
                return False
            groups.setdefault(start // space.SUBGROUP, []).append(stage)
        return all(self.alike(tuple(group)) for group in groups.values())

    def alike(self, own: tuple[One, ...]) -> bool:
        degrees = {(s.tp, s.dp, s.token_shares, s.expert_shares) for s in own}
        if not self.request.stage_degrees and len(degrees) > 1:
            return False
        return self.request.uneven_layers or len({(s.layers, s.recompute) for s in own}) == 1

    def cost_s(self, replicas: int, stages: tuple[One, ...]) -> float | None:
        """Section 4.3.2 for a plan; None where it does not fit."""
        count = self.request.global_batch // self.request.sequences // replicas
        parts = []
        for index, stage in enumerate(stages):
            place = (index, len(stages))
            key = (replicas, stage, place)
            if key not in self.evaluated:
                self.evaluated[key] = self.evaluate(replicas, count, stage, *place)
            parts.append(self.evaluated[key])
        if not all(fits for _, _, fits in parts):
            return None
        alpha = ALPHA[self.request.schedule]
        everyone = sum(busy for busy, _, _ in parts)
        return max(count * own + update + alpha * (everyone - own) for own, update, _ in parts)

    def evaluate(
        self, replicas: int, count: int, stage: One, index: int, stages: int
    ) -> tuple[float, float, bool]:
        """T, U, and whether the stage fits."""
        sequences = replicas * self.request.sequences // stage.dp
        parts = max(1, len(stage.token_shares))
        shape = StageShape(
            layers=stage.layers,
            first=index == 0,
            last=index == stages - 1,
            tp=stage.tp,
            dp=stage.dp * parts,
            sequences=sequences,
            zero_stage=self.request.zero_stage,
            recompute=stage.recompute,
            schedule=self.request.schedule,
            token_shares=stage.token_shares or None,
        )
        chip = self.cluster.chip(stage.start)
        ranks = list(range(stage.start, stage.start + stage.chips))
        groups = [ranks[i : i + stage.tp] for i in range(0, len(ranks), stage.tp)]
        held = in_flight(self.request.schedule, self.pipeline(count, stages), index)
        busy_s = update_s = need = 0.0
        tokens, ep = stage.token_shares or (1,), len(stage.expert_shares)
        for n, group in enumerate(groups):
            replica = groups[n - n % parts : n - n % parts + parts]
            turn, spread = [group], None
            if ep:
                begin = n - n % ep
                turn, rows = (
                    groups[begin : begin + ep],
                    [tokens[i % parts] for i in range(begin, begin + ep)],
                )
                spread = Spread.of(stage.expert_shares, rows, n % ep)
            own = replace(shape, cp_index=n % parts, spread=spread)
            need = max(need, stage_memory(self.model, own, held, count).total)
            for j, rank in enumerate(group):
                link, across, context, experts = (
                    slowest_link(self.cluster, rank, peers)
                    for peers in (
                        tuple(group),
                        tuple(other[j] for other in groups),
                        tuple(other[j] for other in replica),
                        tuple(other[j] for other in turn),
                    )
                )
                time = stage_time(
                    *(self.model, own, chip, link, across), context=context, experts=experts
                )
                busy_s = max(busy_s, time.micro_batch_s)
                update_s = max(update_s, time.step_s)
        return busy_s, update_s, need <= chip.memory.capacity_bytes

    def pipeline(self, count: int, stages: int) -> Pipeline:
        alike = Stage(layers=(0, 1), recompute=False, replicas=())
        return Pipeline(micro_batches=count, stages=(alike,) * stages)

    def plan_cost_s(self, plan: Plan) -> float | None:
        """The cost of a plan that a planner made, read off the plan."""
        stages = tuple(
            One(
                self.names.index(stage.replicas[0].chip),
                stage.replicas[0].ranks[0],
                stage.tp,
                stage.dp,
                stage.layers[1] - stage.layers[0],
                stage.recompute,
                stage.replicas[0].token_shares or (),
                stage.expert_shares or (),
            )
            for stage in plan.pipelines[0].stages
        )
        return self.cost_s(plan.micro_batch // self.request.sequences, stages)


def random_request(generator: random.Random) -> Request:
    """A small instance: 1-3 chip types, 2-16 chips, memory that bites about half the time."""
    uneven, degrees = generator.choice([False, True]), generator.choice([False, False, True])
    most = 6 if degrees else 10 if uneven else 16  # chips; wide spaces grow fast
    layers = generator.randint(2, 5 if degrees and uneven else 6 if uneven or degrees else 8)
    return Request(
        cluster=random_cluster(generator, most),
        model=replace(tiny_model(layers), name=f"invented {generator.random()}"),
        global_batch=generator.choice([2, 4, 8]),
        sequences=generator.choice([1, 1, 2]),
        zero_stage=generator.choice([0, 1, 2]),
        schedule=generator.choice(["1f1b", "1f1b", "1f1b", "gpipe", "zb-h1"]),
        uneven_layers=uneven,
        stage_degrees=degrees,
    )


def random_request_of_parts(generator: random.Random) -> Request:
    """A smaller instance, whose sequences may be cut."""
    request = random_request(generator)
    wide = request.uneven_layers + 2 * request.stage_degrees
    layers = min(request.model.layers, (6, 4, 4, 3)[wide])
    return replace(
        request,
        cluster=random_cluster(generator, (12, 8, 6, 4)[wide]),
        model=replace(
            request.model,
            layers=layers,
            sequence_length=generator.choice([8, 32, 64]),
            attention=generator.choice(["explicit", "fused"]),
        ),
        context_parallel=generator.choice([2, 4, 4, 8]),
    )


def random_request_of_experts(generator: random.Random) -> Request:
    """A smaller instance, whose experts may lie over ranks, and whose sequences now and then be
    cut.
    """
    request = random_request_of_parts(generator)
    sizes = {field.name: getattr(request.model, field.name) for field in fields(request.model)}
    return replace(
        request,
        model=ModelOfExperts(**sizes, experts=generator.choice([2, 3, 4, 8])),
        expert_parallel=generator.choice([2, 4, 4, 8]),
        context_parallel=generator.choice([None, None, 2]),
    )


def _collectives(generator: random.Random) -> Collectives | None:
    """What was measured of collectives inside a node, which is so of half the chips."""
    if generator.random() < 0.5:
        return None
    latency_s = 10 ** generator.uniform(-5, -2)
    return Collectives(latency_s, *(10 ** generator.uniform(5, 8) for _ in range(3)))


def random_cluster(generator: random.Random, most: int) -> Cluster:
    """Several nodes a type, not always of one size, sometimes in two regions."""
    regions = generator.choice([[""], [""], ["east", "west"]])
    entries = []
    total = 0
    for index in range(generator.choice([1, 2, 2, 3])):
        chip = random_chip(generator)
        room = generator.choice([380_000, 430_000, 530_000, 680_000, 10_000_000, 10_000_000])
        chip = replace(
            chip,
            memory=replace(chip.memory, capacity_bytes=room),
            links=replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(5, 8)),
            collectives=_collectives(random.Random(chip.links.intra_node_bytes_per_s)),
        )
        for _ in range(generator.choice([1, 1, 2, 3])):
            size = generator.choice([1, 2, 4])
            if total + size <= most or not entries:
                entries.append((f"chip-{index}", chip, size, generator.choice(regions)))
                total += size
    entries.sort(key=lambda e: (-e[1].memory.capacity_bytes, e[0], e[3], -e[2]))
    nodes, first = [], 0
    for name, chip, size, region in entries:
        nodes.append(Node(name, chip, range(first, first + size), region))
        first += size
    used = sorted({region for *_, region in entries})
    links = ()
    if len(used) == 2:
        rate = 10 ** generator.uniform(5, 8)
        links = (LinkEntry(between=("east", "west"), latency_s=1e-3, bytes_per_s=rate),)
    fabric = Fabric.of([(region, "") for region in used], links)
    return Cluster("made up", tuple(nodes), fabric)
