"""The plan file: which ranks hold which layers, and how a step runs over them.

One shape serves every planner. A plan is JSON with a version; equal plans are equal bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, SerializerFunctionWrapHandler, model_serializer

from heteropp.description.files import FileError, read_json, write_json
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.prediction import Prediction
from heteropp.description.schedules import INTERLEAVING, Schedule
from heteropp.description.slice_checks import validate_slices
from heteropp.description.stage_checks import PlanError, validate_stage
from heteropp.models.spec import ModelError, ModelSpec

PLAN_VERSION = 1
MOST_SLACK = 65_536  # as many micro-batches as a request may have

ZeroStage = Literal[0, 1, 2]
Resharding = Literal["all-gather", "broadcast", "direct"]  # see heteropp.layout.resharding


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One group of ranks that holds a stage.

    It is one tensor-parallel group, of chips of one type. With context parallelism it is several,
    one after the other in `ranks`, and each takes some tokens of every sequence: the first group
    the first `token_shares[0]`, and so on. These groups may be of unlike chips.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    ranks: tuple[int, ...]  # its ranks, ascending
    chip: str  # the chip of its ranks, or of its first group, as the cluster file names it
    batch_share: int  # number of sequences that it takes of each of the stage's micro-batches
    token_shares: tuple[int, ...] | None = None  # tokens of each sequence, by group; absent: one
    group_chips: tuple[str, ...] | None = None  # the chip of each group; absent: all are `chip`

    @property
    def cp(self) -> int:
        """The context-parallel degree: the number of its tensor-parallel groups."""
        return len(self.token_shares) if self.token_shares else 1

    @property
    def chips(self) -> tuple[str, ...]:
        """The chip of each of its tensor-parallel groups."""
        return self.group_chips or (self.chip,) * self.cp

    @property
    def kind(self) -> Hashable:
        """What its ranks take and hold depends on, beside its stage and their links."""
        return self.chips, self.batch_share, self.token_shares

    @cached_property
    def token_ranges(self) -> tuple[tuple[int, int], ...] | None:
        """The tokens [first, last) of a sequence that each of its groups takes; None: all."""
        if self.token_shares is None:
            return None
        return tuple(pairwise((0, *accumulate(self.token_shares))))

    def group(self, cp_index: int) -> tuple[int, ...]:
        """The ranks of one of its tensor-parallel groups."""
        tp = len(self.ranks) // self.cp
        return self.ranks[cp_index * tp : (cp_index + 1) * tp]

    def across(self, tp_index: int) -> tuple[int, ...]:
        """The ranks of one tensor-parallel index, over which sequences are cut: one of a group."""
        return self.ranks[tp_index :: len(self.ranks) // self.cp]

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out of a file what only context parallelism has, where there is none."""
        written: dict[str, Any] = write(self)
        for name in ("token_shares", "group_chips"):
            if written[name] is None:
                del written[name]
        return written


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Contiguous layers [first, last) held by one or more replicas.

    With several ministages `layers` says how many layers the stage holds; which ones follows from
    the schedule (`ministage_layers`). With expert parallelism its tensor-parallel groups, replica
    by replica, have the `expert_shares` in turn: the first group the first so many experts of every
    layer, and so on until all are held, then the next group the first ones again.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    layers: tuple[int, int]  # its first layer, from 0, and the one after its last
    recompute: bool  # whether the backward computes all activations again, to save memory
    replicas: tuple[Replica, ...]  # its replicas, which divide each micro-batch
    ministages: int = 1  # parts of its layers that the schedule runs apart (Zorse, section 4.1.1)
    sequence_parallel: bool = False  # whether a replica's ranks split the rows of uncut activations
    selective_recompute: bool = False  # whether the backward computes attention's scores again
    offload: bool = False  # whether what idle ministages hold waits in host memory (Zorse, 4.1.3)
    slack: int = 0  # micro-batches in flight here beyond those that schedule 1f1b needs
    expert_shares: tuple[int, ...] | None = None  # experts that groups hold; absent: all of them
    # absent: as many as its routers say, and memory is counted for even ones
    expert_capacity: float | None = None  # times the even number of rows that groups take at most

    @property
    def dp(self) -> int:
        """The data-parallel degree: the number of replicas."""
        return len(self.replicas)

    @property
    def tp(self) -> int:
        """The tensor-parallel degree: the number of ranks over which layers are cut."""
        return len(self.replicas[0].ranks) // self.replicas[0].cp

    @property
    def cp(self) -> int:
        """The context-parallel degree: the number of ranks over which sequences are cut."""
        return self.replicas[0].cp

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same slices, and summands of their gradients."""
        return self.dp * self.cp

    @property
    def ep(self) -> int:
        """The expert-parallel degree: the number of ranks over which a layer's experts lie."""
        return len(self.expert_shares) if self.expert_shares else 1

    @property
    def chips(self) -> tuple[str, ...]:
        """The chip of each of its tensor-parallel groups, replica by replica."""
        return tuple(chip for replica in self.replicas for chip in replica.chips)

    @cached_property
    def expert_ranges(self) -> tuple[tuple[int, int], ...]:
        """The experts [first, last) of every layer that each of `ep` groups holds."""
        return tuple(pairwise((0, *accumulate(self.expert_shares or ()))))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of its tensor-parallel groups, replica by replica."""
        return tuple(r.group(i) for r in self.replicas for i in range(r.cp))

    @cached_property
    def micro_batch(self) -> int:
        """Sequences that it works on at once; the plan's micro-batch may be several of them."""
        return sum(replica.batch_share for replica in self.replicas)

    @cached_property
    def shares(self) -> list[tuple[int, int]]:
        """The sequences [first, last) of a micro-batch that each replica works on."""
        lasts = list(accumulate(replica.batch_share for replica in self.replicas))
        return list(pairwise([0, *lasts]))

    def peers(self, tp_index: int) -> list[int]:
        """The ranks that hold the same slices, by number, as a group orders them.

        With ZeRO the first of them keeps the first shard.
        """
        return sorted(rank for replica in self.replicas for rank in replica.across(tp_index))

    @property
    def layer_count(self) -> int:
        """The number of layers, in all ministages together."""
        return self.layers[1] - self.layers[0]

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out of a file what only expert parallelism has, where there is none."""
        written: dict[str, Any] = write(self)
        for name in ("expert_shares", "expert_capacity"):
            if written[name] is None:
                del written[name]
        return written


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """An ordered list of stages that together hold every layer.

    With `token_slices` each micro-batch is cut along its sequences, and a stage runs one slice
    after another, so that the next stage begins after the first of them (TeraPipe, Li et al.). To
    the schedule every slice is a micro-batch of its own: slice j of micro-batch m is number
    m * slices + j.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    micro_batches: int  # how many of the step's micro-batches it takes
    stages: tuple[Stage, ...]  # its stages, from the embedding to the head
    token_slices: tuple[int, ...] | None = None  # tokens of each sequence, by slice; absent: whole

    @property
    def slices(self) -> int:
        """The number of slices in which stages run each micro-batch."""
        return len(self.token_slices) if self.token_slices else 1

    @cached_property
    def slice_ranges(self) -> tuple[tuple[int, int], ...] | None:
        """The tokens [first, last) of a sequence that are in each slice; None: it is whole."""
        if self.token_slices is None:
            return None
        return tuple(pairwise((0, *accumulate(self.token_slices))))

    def parts(self, stage: int) -> int:
        """Returns how many of the stage's own micro-batches make one micro-batch of the plan."""
        whole = max(stage.micro_batch for stage in self.stages)  # the plan's; see validate
        own = self.stages[stage].micro_batch
        return whole // own if own else 1  # a planner's sketch has no replicas yet

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out of a file what only slices have, where there are none."""
        written: dict[str, Any] = write(self)
        if written["token_slices"] is None:
            del written["token_slices"]
        return written


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one training job lies on a cluster's chips: pipelines, stages, replicas, schedule."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    model: ModelSpec  # the model, as a model file has it
    global_batch: int  # number of sequences in a step
    micro_batch: int  # number of sequences in a micro-batch
    schedule: Schedule  # the order of forwards and backwards in a pipeline
    zero_stage: ZeroStage  # what replicas divide: 1 optimizer state, 2 gradients too, 0 none
    optimizer: OptimizerName = "adamw"  # what updates the weights
    pipelines: tuple[Pipeline, ...]  # pipelines, which divide the step's micro-batches
    resharding: Resharding = "all-gather"  # how activations reach a stage that is cut otherwise
    overlap: bool = True  # whether messages go on beside computing, and recompute fills waits
    profile: str | None = None  # name and digest of the profile it was made from; absent: none
    prediction: Prediction | None = None  # what was expected of it when it was made
    members: tuple[str, ...] | None = None  # names of its chips, by rank; absent: all the cluster's
    version: int = field(default=PLAN_VERSION)  # version of the file format

    @cached_property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(r.ranks) for p in self.pipelines for s in p.stages for r in s.replicas)

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """The (pipeline, stage, replica, tensor-parallel index) of a rank."""
        return self._place(rank)[:4]

    def cp_index(self, rank: int) -> int:
        """Which of its replica's tensor-parallel groups, and so of its token shares, a rank has."""
        return self._place(rank)[4]

    def chip(self, rank: int) -> str:
        """The chip of a rank, as the cluster file names it."""
        p, s, r, _, cp_index = self._place(rank)
        return self.pipelines[p].stages[s].replicas[r].chips[cp_index]

    def tokens(self, rank: int) -> tuple[int, int] | None:
        """The tokens [first, last) of each of its sequences that a rank takes; None: all."""
        p, s, r, _, cp_index = self._place(rank)
        ranges = self.pipelines[p].stages[s].replicas[r].token_ranges
        return ranges[cp_index] if ranges else None

    @cached_property
    def has_context_parallelism(self) -> bool:
        """Whether sequences are cut over the ranks of some stage."""
        return any(stage.cp > 1 for pipeline in self.pipelines for stage in pipeline.stages)

    @cached_property
    def has_slices(self) -> bool:
        """Whether some pipeline runs its micro-batches slice by slice."""
        return any(pipeline.token_slices for pipeline in self.pipelines)

    @cached_property
    def has_expert_parallelism(self) -> bool:
        """Whether the experts of a layer lie over the groups of some stage."""
        return any(stage.ep > 1 for pipeline in self.pipelines for stage in pipeline.stages)

    def _place(self, rank: int) -> tuple[int, int, int, int, int]:
        if rank not in self._places:
            raise ValueError(
                f"rank {rank} is not in the plan, which has ranks 0 to {self.world_size - 1}"
            )
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int, int, int, int]]:
        return {
            rank: (p, s, r, i % tp, i // tp)
            for p, pipeline in enumerate(self.pipelines)
            for s, stage in enumerate(pipeline.stages)
            for tp in (stage.tp,)
            for r, replica in enumerate(stage.replicas)
            for i, rank in enumerate(replica.ranks)
        }

    def shard(self, rank: int) -> tuple[int, int]:
        """Which of ZeRO's shards of its slices a rank keeps, and how many there are."""
        p, s, _, tp_index = self.place(rank)
        stage = self.pipelines[p].stages[s]
        count = stage.copies if self.zero_stage else 1
        return stage.peers(tp_index).index(rank) % count, count


def ministage_layers(
    pipeline: Pipeline, schedule: Schedule
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The layers [first, last) of every ministage, by stage, then in the stage's own order.

    The model runs through the stages once a ministage: always from the first stage to the last,
    or, where the schedule is a V, back again every second time. A stage's ministages are as equal
    as they can be, longer ones first. Chimera's stages hold all their layers, and all of the
    mirrored stage's.
    """
    if schedule == "chimera":
        mirrored = reversed(pipeline.stages)
        return tuple((s.layers, m.layers) for s, m in zip(pipeline.stages, mirrored, strict=True))
    counts = tuple((stage.layer_count, stage.ministages) for stage in pipeline.stages)
    return _in_turns(counts, schedule == "zb-v")


@lru_cache(maxsize=4096)
def _in_turns(
    counts: tuple[tuple[int, int], ...], returns: bool
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns the layers of every ministage. A search asks for the same ones again and again.

    counts: by stage, its layers and its ministages. returns: whether every second turn goes back.
    """
    held: list[list[tuple[int, int]]] = [[] for _ in counts]
    first = 0
    for turn in range(max(ministages for _, ministages in counts)):
        order = list(enumerate(counts))
        if returns and turn % 2:
            order.reverse()
        for s, (layers, ministages) in order:
            if turn >= ministages:
                continue
            size, rest = divmod(layers, ministages)
            last = first + size + (turn < rest)
            held[s].append((first, last))
            first = last
    return tuple(map(tuple, held))


def validate(plan: Plan) -> None:
    """Checks everything that does not need the cluster. Raises PlanError."""
    if plan.version != PLAN_VERSION:
        raise PlanError(f"version is {plan.version}; this release reads version {PLAN_VERSION}")
    try:
        plan.model.validate()
    except ModelError as error:
        raise PlanError(f"model: {error}") from None
    for name in ("global_batch", "micro_batch"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}; expected at least 1")
    if not plan.pipelines:
        raise PlanError("pipelines is empty; expected at least one")
    for p, pipeline in enumerate(plan.pipelines):
        _validate_pipeline(plan, pipeline, f"pipelines[{p}]")
    micro_batches = sum(pipeline.micro_batches for pipeline in plan.pipelines)
    if micro_batches * plan.micro_batch != plan.global_batch:
        raise PlanError(
            f"{micro_batches} micro-batches of {plan.micro_batch} sequences make "
            f"{micro_batches * plan.micro_batch}; global_batch is {plan.global_batch}"
        )
    _validate_ranks(plan)
    if plan.optimizer == "muon":
        _validate_copies(plan)


def _validate_copies(plan: Plan) -> None:
    """Checks that Muon computes each element on chips of one type.

    Its products are not the same to the last bit on others, and copies would drift apart. An
    element has one owner where replicas of one stage share the optimizer's state.
    """
    chips: dict[int, list[set[str]]] = defaultdict(list)  # by layer and place
    for pipeline in plan.pipelines:
        spans = ministage_layers(pipeline, plan.schedule)
        for stage, own in zip(pipeline.stages, spans, strict=True):
            for layer in (layer for span in own for layer in range(*span)):
                chips[layer].append(set(stage.chips))
    for layer, places in sorted(chips.items()):
        found = set().union(*places)
        if len(found) > 1 and (len(places) > 1 or not plan.zero_stage):
            raise PlanError(
                f"optimizer muon: layer {layer} is held by chips {' and '.join(sorted(found))}, on "
                "which its copies would drift apart; expected chips of one type, or one stage of "
                "replicas and zero_stage 1 or 2"
            )


def _validate_pipeline(plan: Plan, pipeline: Pipeline, where: str) -> None:
    if pipeline.micro_batches < 1:
        raise PlanError(f"{where}.micro_batches is {pipeline.micro_batches}; expected at least 1")
    if not pipeline.stages:
        raise PlanError(f"{where}.stages is empty; expected at least one")
    held = {stage.ministages for stage in pipeline.stages}
    if plan.schedule in ("zb-v", "chimera") and held != {2}:
        raise PlanError(f"{where}: schedule {plan.schedule} runs two ministages on every stage")
    if plan.schedule == "chimera" and len(pipeline.stages) % 2:
        raise PlanError(
            f"{where} has {len(pipeline.stages)} stages; schedule chimera needs an even number"
        )
    if plan.schedule == "chimera" and pipeline.micro_batches < 2:
        raise PlanError(f"{where}.micro_batches is 1; schedule chimera sends one each way")
    if plan.schedule == "interleaved-1f1b" and len(held) > 1:
        raise PlanError(f"{where}: schedule interleaved-1f1b runs as many ministages on each stage")
    expected_first = 0
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        first, last = stage.layers
        if first != expected_first:
            raise PlanError(f"{here}.layers starts at {first}; expected {expected_first}")
        if last <= first:
            raise PlanError(
                f"{here}.layers [{first}, {last}) is empty; expected at least one layer"
            )
        expected_first = last
        _validate_ministages(plan, stage, here)
        _validate_slack(plan, pipeline.stages, s, here)
        validate_stage(plan.model, plan.micro_batch, stage, here)
    largest = max(stage.micro_batch for stage in pipeline.stages)
    if largest != plan.micro_batch:
        raise PlanError(
            f"{where}: no stage takes micro_batch {plan.micro_batch} whole; the largest sum of "
            f"batch shares is {largest}"
        )
    if expected_first != plan.model.layers:
        raise PlanError(
            f"{where} holds layers up to {expected_first}; the model has {plan.model.layers}"
        )
    validate_slices(plan.model, plan.micro_batch, plan.schedule, pipeline, where)


def _validate_ministages(plan: Plan, stage: Stage, where: str) -> None:
    most = 2 if plan.schedule == "chimera" else stage.layer_count
    if not 1 <= stage.ministages <= most:
        raise PlanError(
            f"{where}.ministages is {stage.ministages}; expected 1 to its "
            f"{stage.layer_count} layers"
        )
    if stage.ministages > 1 and plan.schedule not in INTERLEAVING:
        raise PlanError(
            f"{where}.ministages is {stage.ministages}; schedule {plan.schedule} runs one a stage"
        )


def _validate_slack(plan: Plan, stages: Sequence[Stage], s: int, where: str) -> None:
    stage, most = stages[s], MOST_SLACK
    expected = f"0 to {most}"
    if s:  # with more it would wait for forwards that the stage before does not run so early
        most = s + 1 + max(0, stages[s - 1].slack - (s - 1))
        expected = f"0 to {most} after the stage before it"
    if not 0 <= stage.slack <= most:
        raise PlanError(f"{where}.slack is {stage.slack}; expected {expected}")
    if stage.slack and stage.offload:
        raise PlanError(f"{where}: slack keeps on the chip what offload would take away")
    if stage.slack and plan.schedule != "1f1b":
        raise PlanError(
            f"{where}.slack is {stage.slack}; schedule {plan.schedule} says itself what is put off"
        )


def _validate_ranks(plan: Plan) -> None:
    used = Counter(
        rank for p in plan.pipelines for s in p.stages for r in s.replicas for rank in r.ranks
    )
    for rank, times in sorted(used.items()):
        if times > 1:
            raise PlanError(f"rank {rank} is used {times} times; expected once")
    for rank, expected in zip(sorted(used), range(len(used)), strict=True):
        if rank != expected:
            raise PlanError(f"ranks are not 0 to {len(used) - 1}: rank {expected} is missing")


def read_plan(path: Path) -> Plan:
    """Reads and validates a plan file. Raises FileError, one sentence."""
    plan = read_json(path, Plan)
    try:
        validate(plan)
    except PlanError as error:
        raise FileError(f"{path}: {error}") from None
    return plan


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan atomically; equal plans give equal bytes."""
    validate(plan)
    write_json(path, plan)
