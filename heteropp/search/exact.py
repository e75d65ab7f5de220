"""The exact planner: the best plan of one pipeline in HeteroAuto's space (section 4.3).

Decided jointly: the data-parallel degree, and for each chip type its tensor-parallel degree, its
number of stages, its layers (the same for each of its stages) and recompute. All chips are used;
chips with more memory come first (Observation #4). Over each choice of degrees a dynamic programme
over (chip types, layers) keeps every Pareto-optimal pair of bottleneck and sum, from which the
formula of section 4.3.2,
    T = max_i (b T_i + U_i + alpha sum_{j != i} T_j),
is minimised exactly. The best few by formula are simulated, and the best simulated is the answer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ditorch.chips import ChipSpec
from heteropp.cluster import Cluster
from heteropp.cost import StageShape, stage_memory, stage_time
from heteropp.model import Model
from heteropp.plan import Pipeline, Plan, Prediction, Replica, Stage
from heteropp.planned import overrun, rank_memory, slowest_link
from heteropp.simulate import simulate

ALPHA = 1.0  # 1F1B's bubble coefficient
SIMULATED = 8  # candidates


class SearchError(ValueError):
    """No plan can be given; the message is one sentence."""


class DoesNotFitError(SearchError):
    """Every plan overruns some chip's memory; `plan` is the one that does so least."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


@dataclass(frozen=True)
class Candidate:
    plan: Plan
    formula_s: float  # section 4.3.2
    step_s: float  # simulated


@dataclass(frozen=True)
class Result:
    best: Candidate
    runners_up: list[Candidate]
    lower_bound_s: float  # no plan of the space takes less, bubbles and messages left out
    considered: int  # choices of degrees


@dataclass(frozen=True)
class Degrees:
    """One choice of everything but layers and recompute."""

    dp: int
    micro_batches: int
    tp: tuple[int, ...]  # by chip type
    pp: tuple[int, ...]


@dataclass(frozen=True, order=True)
class Option:
    """One chip type's layers per stage and recompute, and what they come to over its stages."""

    layers: int
    recompute: bool
    bottleneck_s: float  # largest (b - alpha) T + U
    busy_s: float  # largest b T + U
    sum_s: float  # sum of T
    overrun_bytes: int  # largest need beyond capacity


@dataclass(frozen=True, order=True)
class Choice:
    """Options for the first chip types, summed up."""

    bottleneck_s: float
    sum_s: float
    overrun_bytes: int
    busy_s: float
    options: tuple[Option, ...]

    def add(self, option: Option) -> Choice:
        return Choice(
            max(self.bottleneck_s, option.bottleneck_s),
            self.sum_s + option.sum_s,
            max(self.overrun_bytes, option.overrun_bytes),
            max(self.busy_s, option.busy_s),
            (*self.options, option),
        )

    @property
    def formula_s(self) -> float:
        return self.bottleneck_s + ALPHA * self.sum_s


NOTHING = Choice(0.0, 0.0, 0, 0.0, ())


def search(
    cluster: Cluster, model: Model, global_batch: int, sequences: int = 1, zero_stage: int = 1
) -> Result:
    """The best plan for `global_batch` sequences a step, `sequences` a replica and micro-batch.

    Raises SearchError when no degrees suit the cluster, DoesNotFitError when memory does not.
    """
    space = Space(cluster, model, global_batch, sequences, zero_stage)
    choices = [(degrees, choice) for degrees in space.degrees for choice in space.fitting(degrees)]
    if not choices:
        raise space.does_not_fit()
    best = heapq.nsmallest(SIMULATED, choices, key=lambda pair: pair[1].formula_s)
    candidates = []
    for degrees, choice in best:
        plan = space.plan(degrees, choice)
        step_s = simulate(plan, cluster).step_s
        candidates.append(Candidate(plan, choice.formula_s, step_s))
    candidates.sort(key=lambda candidate: candidate.step_s)
    bound = min(space.least_busy_s(degrees) for degrees in space.degrees)
    first = candidates[0]
    predicted = replace(first.plan, prediction=predict(first.plan, cluster, first.step_s, bound))
    return Result(
        replace(first, plan=predicted), candidates[1:], bound, considered=len(space.degrees)
    )


def predict(plan: Plan, cluster: Cluster, step_s: float, lower_bound_s: float) -> Prediction:
    tokens = plan.global_batch * plan.model.sequence_length
    return Prediction(
        step_s=step_s,
        lower_bound_s=lower_bound_s,
        tokens_per_chip_per_s=tokens / step_s / plan.world_size,
        memory_bytes=tuple(memory.total for memory in rank_memory(plan)),
        capacity_bytes=tuple(
            cluster.chip(rank).memory.capacity_bytes for rank in range(plan.world_size)
        ),
    )


@dataclass(frozen=True)
class Space:
    cluster: Cluster
    model: Model
    global_batch: int
    sequences: int
    zero_stage: int

    @cached_property
    def types(self) -> list[tuple[str, ChipSpec, list[int]]]:
        """Each chip type: its name, its chip, and its ranks."""
        result = []
        for name in self.cluster.chip_names():
            ranks = self.cluster.ranks_of(name)
            result.append((name, self.cluster.chip(ranks[0]), ranks))
        return result

    @cached_property
    def degrees(self) -> list[Degrees]:
        """Every choice of degrees; at least one, or SearchError."""
        if self.global_batch % self.sequences:
            raise SearchError(
                f"global batch {self.global_batch} is not a multiple of the "
                f"{self.sequences} sequences of a micro-batch in each replica"
            )
        slots = self.global_batch // self.sequences
        most = min(slots, *(len(ranks) for _, _, ranks in self.types))
        found = [d for dp in range(1, most + 1) if slots % dp == 0 for d in self._degrees(dp)]
        if not found:
            counts = ", ".join(f"{len(ranks)} of chip {name}" for name, _, ranks in self.types)
            raise SearchError(
                f"no degrees use all chips ({counts}): each count must be stages x tp x dp, dp "
                f"must divide {slots}, and a type's stages hold the same number of the "
                f"{self.model.layers} layers"
            )
        return found

    def _degrees(self, dp: int) -> Iterator[Degrees]:
        slots = self.global_batch // self.sequences
        options = []
        for name, chip, ranks in self.types:
            options.append(
                [tp for tp in self._tp_degrees(name, chip) if len(ranks) % (tp * dp) == 0]
            )
        for tp in itertools.product(*options):
            pp = tuple(
                len(ranks) // (t * dp) for t, (_, _, ranks) in zip(tp, self.types, strict=True)
            )
            if _layers_divide(self.model.layers, pp):
                yield Degrees(dp, slots // dp, tp, pp)

    def _tp_degrees(self, name: str, chip: ChipSpec) -> list[int]:
        """Powers of two up to TP_MAX that divide the nodes and the model."""
        nodes = [len(node.ranks) for node in self.cluster.nodes if node.chip_name == name]
        model = self.model
        sizes = [*nodes, model.kv_heads, model.intermediate, model.vocab, model.sequence_length]
        powers = itertools.takewhile(lambda tp: tp <= chip.tp_limit, (2**i for i in range(20)))
        return [tp for tp in powers if all(size % tp == 0 for size in sizes)]

    def options(self, degrees: Degrees, index: int) -> list[Option]:
        """What one chip type may hold under these degrees."""
        key = (degrees, index)
        if key not in self._options:
            self._options[key] = self._list_options(degrees, index)
        return self._options[key]

    @cached_property
    def _options(self) -> dict[tuple[Degrees, int], list[Option]]:
        return {}

    def _list_options(self, degrees: Degrees, index: int) -> list[Option]:
        others = sum(degrees.pp) - degrees.pp[index]
        most = (self.model.layers - others) // degrees.pp[index]
        return [
            self._option(degrees, index, layers, recompute)
            for layers in range(1, most + 1)
            for recompute in (False, True)
        ]

    def _option(self, degrees: Degrees, index: int, layers: int, recompute: bool) -> Option:
        _, chip, ranks = self.types[index]
        dp, tp, b = degrees.dp, degrees.tp[index], degrees.micro_batches
        inside = slowest_link(self.cluster, ranks[0], tuple(ranks[:tp]))
        across = slowest_link(self.cluster, ranks[0], tuple(ranks[0 : dp * tp : tp]))
        stages, before = sum(degrees.pp), sum(degrees.pp[:index])
        bottleneck_s = busy_s = sum_s = 0.0
        overrun_bytes = 0
        # stages alike but for the first and last: cost them once, with the most in flight
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for stage in range(before, before + degrees.pp[index]):
            kinds.setdefault((stage == 0, stage == stages - 1), []).append(stage)
        for (first, last), members in kinds.items():
            shape = StageShape(
                layers=layers,
                first=first,
                last=last,
                tp=tp,
                dp=dp,
                sequences=self.sequences,
                zero_stage=self.zero_stage,
                recompute=recompute,
            )
            time = stage_time(self.model, shape, chip, inside, across)
            held = min(stages - members[0], b)
            need = stage_memory(self.model, shape, held, b).total
            overrun_bytes = max(overrun_bytes, need - chip.memory.capacity_bytes)
            bottleneck_s = max(bottleneck_s, (b - ALPHA) * time.micro_batch_s + time.step_s)
            busy_s = max(busy_s, b * time.micro_batch_s + time.step_s)
            sum_s += len(members) * time.micro_batch_s
        return Option(layers, recompute, bottleneck_s, busy_s, sum_s, max(0, overrun_bytes))

    def fitting(self, degrees: Degrees) -> list[Choice]:
        """The Pareto-optimal choices of layers and recompute that fit."""
        fronts: dict[int, list[Choice]] = {0: [NOTHING]}
        for index, pp in enumerate(degrees.pp):
            longer: dict[int, list[Choice]] = {}
            for option in self.options(degrees, index):
                if option.overrun_bytes:
                    continue
                for used, choices in fronts.items():
                    total = used + pp * option.layers
                    if total <= self.model.layers:
                        longer.setdefault(total, []).extend(c.add(option) for c in choices)
            fronts = {total: pareto(choices) for total, choices in longer.items()}
        return fronts.get(self.model.layers, [])

    def least_busy_s(self, degrees: Degrees) -> float:
        """The least that the busiest stage can be busy; memory left out."""
        return self._minimax(degrees, lambda choice: choice.busy_s).busy_s

    def least_overrun(self, degrees: Degrees) -> Choice:
        return self._minimax(degrees, lambda choice: (choice.overrun_bytes, choice.formula_s))

    def _minimax(self, degrees, key) -> Choice:
        best: dict[int, Choice] = {0: NOTHING}
        for index, pp in enumerate(degrees.pp):
            longer: dict[int, Choice] = {}
            for option in self.options(degrees, index):
                for used, choice in best.items():
                    total = used + pp * option.layers
                    if total > self.model.layers:
                        continue
                    added = choice.add(option)
                    if total not in longer or key(added) < key(longer[total]):
                        longer[total] = added
            best = longer
        return best[self.model.layers]

    def does_not_fit(self) -> DoesNotFitError:
        pairs = [(degrees, self.least_overrun(degrees)) for degrees in self.degrees]
        degrees, choice = min(pairs, key=lambda pair: pair[1].overrun_bytes)
        plan = self.plan(degrees, choice)
        memory = rank_memory(plan)
        capacity = [self.cluster.chip(r).memory.capacity_bytes for r in range(plan.world_size)]
        rank = max(range(plan.world_size), key=lambda r: (memory[r].total - capacity[r], -r))
        sentence = overrun(plan, rank, memory[rank].total, capacity[rank])
        return DoesNotFitError(f"no plan fits: in the nearest, {sentence}", plan)

    def plan(self, degrees: Degrees, choice: Choice) -> Plan:
        stages, first = [], 0
        for index, option in enumerate(choice.options):
            name, _, ranks = self.types[index]
            tp = degrees.tp[index]
            groups = [tuple(ranks[i : i + tp]) for i in range(0, len(ranks), tp)]
            for stage in range(degrees.pp[index]):
                held = groups[stage * degrees.dp : (stage + 1) * degrees.dp]
                replicas = tuple(
                    Replica(ranks=group, chip=name, batch_share=self.sequences) for group in held
                )
                last = first + option.layers
                stages.append(
                    Stage(layers=(first, last), recompute=option.recompute, replicas=replicas)
                )
                first = last
        pipeline = Pipeline(micro_batches=degrees.micro_batches, stages=tuple(stages))
        return Plan(
            model=self.model,
            global_batch=self.global_batch,
            micro_batch=self.sequences * degrees.dp,
            schedule="1f1b",
            zero_stage=1 if self.zero_stage else 0,
            pipelines=(pipeline,),
        )


def _layers_divide(layers: int, pp: tuple[int, ...]) -> bool:
    """Whether all layers can be held with the same number, at least one, on a type's stages."""
    reachable = {0}
    for stages in pp:
        reachable = {used + n for used in reachable for n in range(stages, layers + 1, stages)}
    return layers in reachable


def pareto(choices: list[Choice]) -> list[Choice]:
    """Those that no other beats in both bottleneck and sum."""
    front: list[Choice] = []
    for choice in sorted(choices):
        if not front or choice.sum_s < front[-1].sum_s:
            front.append(choice)
    return front
