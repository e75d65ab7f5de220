"""The time of a stage: seconds, from chip files and the traced stage module.

A stage of n layers costs what one of 1 layer costs, plus n - 1 times the difference between 2
layers and 1; both are traced, once for each kind of stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from heteropp.cost.block_terms import KindTerms, Terms, by_kind, for_blocks
from heteropp.cost.communication import NO_LINK, all_gather_s, all_reduce_s
from heteropp.cost.kernels import host_s, kernels_s
from heteropp.cost.stage_memory import Memory, StageShape, kept_bytes, stage_memory
from heteropp.cost.tracing.traces import StageTrace, StageTraces, TracedPiece, trace_stages
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Link
from heteropp.description.profile import ChipProfile, ProfileError
from heteropp.models.spec import ModelSpec

__all__ = [
    "Memory",
    "StageShape",
    "Time",
    "all_gather_s",
    "all_reduce_s",
    "ends_s",
    "formula_s",
    "over_slices",
    "stage_memory",
    "stage_time",
]

ITEMSIZE = {"float32": 4, "float64": 8}  # bytes of an element
OF_A_MICRO_BATCH = (
    *("forward_s", "forward_collective_s", "recompute_s", "backward_s", "backward_collective_s"),
    *("backward_input_s", "backward_weight_s", "store_s", "fetch_s"),
)
MEASURED = ("forward_s", "recompute_s", "backward_input_s", "backward_weight_s", "norm_s")
Waits = tuple[float, float]  # seconds in one layer: for what comes, and for what is sent


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one rank: the first ones for one micro-batch, the others for a step.

    What is said to be part of another is counted there already.
    """

    forward_s: float
    # part of forward_s: between a replica's ranks, and those over which experts lie, where it waits
    forward_collective_s: float
    # not part of forward_s or backward_s: what it waits in the first layer for others that have
    # parts of its sequences. What they send in later layers is as late: it waits for no more
    forward_behind_s: float
    backward_behind_s: float
    # part of forward_s, and of backward_s: what it waits in each layer for what it sends them
    forward_held_s: float
    backward_held_s: float
    recompute_s: float  # a forward again, its collectives included
    # a first stage's is not cut in two, and may wait for less than its parts do
    backward_s: float
    backward_collective_s: float  # part of its parts: the same
    backward_input_s: float  # its first part: what the stage before waits for
    backward_weight_s: float  # its rest
    store_s: float  # to the host, what the forward keeps; computing hides it, if it can
    fetch_s: float  # back from there, for the backward
    reduce_s: float  # gradients over the replicas
    reduce_exposed_s: float  # part of reduce_s: what the backward of later ministages cannot hide
    norm_s: float  # of its gradients, before the ranks exchange their norms
    update_s: float  # clip, the optimizer, gather the parameters
    gather_s: float  # part of update_s: the parameters over the replicas
    load_s: float  # parameters between host and chip, what nothing hides

    @property
    def micro_batch_s(self) -> float:
        """T_comp of section 4.3.2; the way to the host goes on beside, and counts if longer."""
        return max(self.forward_s, self.store_s) + max(
            self.recompute_s + self.backward_s, self.fetch_s
        )

    @property
    def step_s(self) -> float:
        """T_update of section 4.3.2: what of the update no backward covers."""
        return self.reduce_exposed_s + self.norm_s + self.update_s + self.load_s


def over_slices(times: Sequence[Time]) -> Time:
    """Returns the time of micro-batches whose slices take these times, one after another."""
    if len(times) == 1:
        return times[0]
    summed = {name: sum(getattr(time, name) for time in times) for name in OF_A_MICRO_BATCH}
    return replace(times[0], **summed)


def formula_s(times: Sequence[Time], micro_batches: int, alpha: float) -> float:
    """The time of a step by section 4.3.2, from those of its stages."""
    bubble_s = sum(time.micro_batch_s for time in times)
    return max(
        micro_batches * time.micro_batch_s + time.step_s + alpha * (bubble_s - time.micro_batch_s)
        for time in times
    )


@lru_cache(maxsize=65536)
def stage_time(
    model: ModelSpec,
    shape: StageShape,
    chip: ChipSpec,
    inside: Link,
    across: Link,
    profile: ChipProfile | None = None,
    context: Link = NO_LINK,
    pairs_apart: bool = False,
    experts: Link = NO_LINK,
) -> Time:
    """Predicted seconds. `inside` links a tensor-parallel group, `across` links the ranks that hold
    the same slices, `context` those among which sequences are cut, and `experts` those over which
    experts lie; pairs_apart: each two of both have a link of their own, as emulated chips do.

    profile: what was measured of the chip, in place of what the chip file says of computing.
    Raises ProfileError where it does not know the stage.
    """
    traces = trace_stages(model, shape.kind(), shape.blocks)
    copies = shape.dp, shape.expert_copies
    forward, own, other, *collectives, reduce, norm, update, gather, flat_bytes = (
        figure
        for terms in (
            _computing(traces, model.dtype, chip),
            _collectives(traces, shape.tp, inside, context, experts, pairs_apart),
            _step(traces, model.wide_dtype, copies, shape.zero_stage, chip, across),
        )
        for figure in for_blocks(terms, shape.layers)
    )
    orthogonal = _orthogonal_s(traces, shape, model.wide_dtype, chip, inside, across)
    forward_tp, own_tp, other_tp, parts = collectives
    reduce += parts
    waits: tuple[Waits, Waits] = (0.0, 0.0), (0.0, 0.0)
    in_whole = issued_s = 0.0  # what only a backward hides that is not cut, and its host's work
    if shape.token_shares is not None:
        waits = _waits(traces, model.dtype, chip, context, pairs_apart)
    if shape.spread is not None or shape.token_shares is not None:
        links = context, experts
        cut = for_blocks(_hidden(traces, model.dtype, chip, *links, pairs_apart), shape.layers)
        forward_tp, own_tp, other_tp = forward_tp - cut[0], own_tp - cut[1], other_tp - cut[2]
        if shape.spread is not None and shape.first:  # no stage before waits for a part of it
            whole = trace_stages(model, shape.kind(True), shape.blocks)
            hidden_s = _hidden(whole, model.dtype, chip, *links, pairs_apart)
            in_whole = sum(for_blocks(hidden_s, shape.layers)[1:]) - sum(cut[1:])
    recompute = forward
    if profile is not None:
        forward, recompute, own, other, norm, update = _measured(
            model, shape, chip, across, profile
        )
    elif chip.kernels is not None:
        every_issued = for_blocks(_issuing(traces, chip), shape.layers)
        issued_s = sum(every_issued[1:])
        forward, own, other = (
            max(computing, issued - collective)
            for computing, issued, collective in zip(
                (forward, own, other),
                every_issued,
                (forward_tp, own_tp, other_tp),
                strict=True,
            )
        )
        recompute, forward = forward, forward + chip.kernels.micro_batch_s
    # measured kernels may be shorter than those that were to hide messages
    forward_s, in_whole = forward + forward_tp, min(in_whole, other)
    backward_s = max(own + own_tp + other + other_tp - in_whole, issued_s)
    host = chip.links.host_bytes_per_s
    store_s = kept_bytes(model, shape, profile) / host if shape.offload else 0.0
    # a ministage's reduction begins when its last backward ends; the last ministage's is exposed
    hidden = (shape.ministages - 1) / shape.ministages
    return Time(
        forward_s=forward_s,
        forward_collective_s=forward_tp,
        forward_behind_s=waits[0][0],
        backward_behind_s=waits[1][0],
        forward_held_s=waits[0][1],
        backward_held_s=waits[1][1],
        recompute_s=recompute + forward_tp if shape.recompute else 0.0,
        backward_s=backward_s,
        backward_collective_s=own_tp + other_tp,
        backward_input_s=own + own_tp,
        backward_weight_s=other + other_tp,
        store_s=store_s,
        fetch_s=store_s,
        reduce_s=reduce,
        reduce_exposed_s=max(reduce / shape.ministages, reduce - hidden * backward_s),
        norm_s=norm,
        update_s=update + orthogonal + gather,
        gather_s=gather,
        # the first ministage comes before anything runs, and the last one leaves when all is done
        load_s=2 * flat_bytes / shape.ministages / host if shape.offload else 0.0,
    )


def _measured(
    model: ModelSpec, shape: StageShape, chip: ChipSpec, across: Link, profile: ChipProfile
) -> Terms:
    """Returns the seconds that a profile says of a forward, of one again, of both parts of a
    backward, of the norm and of the update.

    Profiles measure ranks with all experts. Where these lie over ranks, what was measured of the
    blocks changes as the chip file says that it does; embedding and head have no experts.
    """
    if not shape.is_profiled:
        raise ProfileError(
            f"profile {profile.name} measured no stage with sequence or context parallelism, "
            "slices, selective recompute or Muon; plan without the profile, or without them"
        )
    measured = _profiled(shape, profile)
    if shape.spread is None:
        return measured
    blocks = replace(shape, first=False, last=False)
    whole = replace(blocks, spread=None)
    return tuple(
        seconds + of_blocks * (here_s / all_s - 1) if all_s else seconds
        for seconds, of_blocks, here_s, all_s in zip(
            measured,
            _profiled(blocks, profile),
            _by_chip_file(model, blocks, chip, across),
            _by_chip_file(model, whole, chip, across),
            strict=True,
        )
    )


def _profiled(shape: StageShape, profile: ChipProfile) -> Terms:
    """Returns what was measured of a stage with all experts, term by term of _measured."""
    shards = shape.dp if shape.zero_stage else 1
    kind = (shape.first, shape.last, shape.tp, shape.sequences)
    *micro_batch, norm = (profile.seconds(term, shape.layers, kind) for term in MEASURED)
    return (*micro_batch, norm / shards, profile.update_s(shape.layers, kind, shards))


def _by_chip_file(model: ModelSpec, shape: StageShape, chip: ChipSpec, across: Link) -> Terms:
    """Returns what the chip file says of a stage, term by term of _measured."""
    traces = trace_stages(model, shape.kind(), shape.blocks)
    copies = shape.dp, shape.expert_copies
    forward, own, other = for_blocks(_computing(traces, model.dtype, chip), shape.layers)
    step = _step(traces, model.wide_dtype, copies, shape.zero_stage, chip, across)
    _, norm, update, *_ = for_blocks(step, shape.layers)
    return forward, forward, own, other, norm, update


def ends_s(
    model: ModelSpec, shape: StageShape, chip: ChipSpec, inside: Link, across: Link
) -> tuple[float, float]:
    """What the embedding and the head (with the loss) add to a stage's micro_batch_s."""

    def micro_batch_s(first: bool, last: bool) -> float:
        kind = replace(shape, first=first, last=last)
        return stage_time(model, kind, chip, inside, across).micro_batch_s

    return (
        micro_batch_s(shape.first, False) - micro_batch_s(False, False),
        micro_batch_s(False, shape.last) - micro_batch_s(False, False),
    )


@lru_cache(maxsize=65536)
def _computing(traces: StageTraces, dtype: str, chip: ChipSpec) -> KindTerms:
    """Returns the seconds that a micro-batch's operators take, for one layer and for two: the
    forward's, and those of both parts of the backward.
    """

    def terms(t: StageTrace) -> Terms:
        pieces = (t.forward, t.backward_input, t.backward_weight)
        return tuple(_operators_s(piece, dtype, chip) for piece in pieces)

    return by_kind(traces, terms)


@lru_cache(maxsize=65536)
def _issuing(traces: StageTraces, chip: ChipSpec) -> KindTerms:
    """Returns the seconds in which the host issues a micro-batch's operators and collectives, for
    one layer and for two: the forward's, and those of both parts of the backward.
    """

    def terms(t: StageTrace) -> Terms:
        return tuple(host_s(p, chip) for p in (t.forward, t.backward_input, t.backward_weight))

    return by_kind(traces, terms)


@lru_cache(maxsize=65536)
def _collectives(
    traces: StageTraces, tp: int, inside: Link, context: Link, experts: Link, pairs_apart: bool
) -> KindTerms:
    """Returns the seconds that ranks exchange activations for, for one layer and for two:
    in a micro-batch's forward, in both parts of its backward, and once a step.
    """

    def exchange_s(piece: TracedPiece) -> float:
        messages = piece.peer_bytes if pairs_apart else piece.exchange_bytes
        routed = piece.routed_peer_bytes if pairs_apart else piece.routed_bytes
        return _seconds(messages, context) + _seconds(routed, experts)

    def terms(t: StageTrace) -> Terms:
        return (
            *(
                sum(n * all_reduce_s(size, tp, inside) for n, size in piece.all_reduce_bytes)
                + sum(n * all_gather_s(size, tp, inside) for n, size in piece.gather_bytes)
                + exchange_s(piece)
                for piece in (t.forward, t.backward_input, t.backward_weight)
            ),
            all_reduce_s(t.parts_bytes, tp, inside) if t.parts_bytes else 0.0,
        )

    return by_kind(traces, terms)


@lru_cache(maxsize=65536)
def _hidden(
    traces: StageTraces,
    dtype: str,
    chip: ChipSpec,
    context: Link,
    experts: Link,
    pairs_apart: bool,
) -> KindTerms:
    """Returns the seconds of messages between ranks with other tokens or experts in which these
    compute what needs none of them, for one layer and for two: in the forward and both parts of the
    backward.
    """

    def hidden_s(overlap: TracedPiece) -> float:
        message_s = _message_s(overlap, context, experts, pairs_apart)
        return min(message_s, _operators_s(overlap, dtype, chip))

    def terms(t: StageTrace) -> Terms:
        pieces = (t.forward, t.backward_input, t.backward_weight)
        return tuple(sum(map(hidden_s, piece.overlaps)) for piece in pieces)

    return by_kind(traces, terms)


@lru_cache(maxsize=65536)
def _waits(
    traces: StageTraces, dtype: str, chip: ChipSpec, context: Link, pairs_apart: bool
) -> tuple[Waits, Waits]:
    """Returns what a rank waits in a layer's forward, and in its backward, for what ranks that
    begin it together send it, and for what it sends them.
    """

    def behind_s(overlap: TracedPiece) -> float:
        awaited = overlap.awaited_peer_bytes if pairs_apart else overlap.awaited_bytes
        message_s = _message_s(overlap, context, NO_LINK, pairs_apart)
        busy_s = max(message_s, _operators_s(overlap, dtype, chip))
        return max(0.0, _seconds(awaited, context) - busy_s)

    def held_s(overlap: TracedPiece) -> float:
        message_s = _message_s(overlap, context, NO_LINK, pairs_apart)
        return max(0.0, message_s - _operators_s(overlap, dtype, chip))

    def longest(pieces: Iterable[TracedPiece]) -> Waits:
        overlaps = [overlap for piece in pieces for overlap in piece.overlaps]
        return max(map(behind_s, overlaps), default=0.0), max(map(held_s, overlaps), default=0.0)

    first_layers = [kind.one for kind in traces.kinds]
    return (
        longest(layer.forward for layer in first_layers),
        longest(layer.backward_input for layer in first_layers),
    )


def _message_s(overlap: TracedPiece, context: Link, experts: Link, pairs_apart: bool) -> float:
    """Returns the seconds of the message of an overlap."""
    exchanged = overlap.peer_bytes if pairs_apart else overlap.exchange_bytes
    routed = overlap.routed_peer_bytes if pairs_apart else overlap.routed_bytes
    return _seconds(exchanged, context) + _seconds(routed, experts)


def _seconds(messages: Iterable[tuple[int, int]], link: Link) -> float:
    """Returns the seconds of messages one after another; messages: how many, and their bytes."""
    return sum(n * link.seconds(size) for n, size in messages)


@lru_cache(maxsize=65536)
def _step(
    traces: StageTraces,
    wide: str,
    copies: tuple[int, int],
    zero_stage: int,
    chip: ChipSpec,
    across: Link,
) -> KindTerms:
    """Returns what a step costs besides its micro-batches, for one layer and for two.

    It is the seconds of the gradients' reduction, of their norm, of the update of each element and
    of gathering the parameters; and the parameters' bytes. copies: ranks that hold the same slices,
    and of experts that lie over ranks; the links of the latter are taken to be no faster.
    """
    reduce = all_gather_s if zero_stage else all_reduce_s
    dp, of_experts = copies
    shards, expert_shards = copies if zero_stage else (1, 1)

    def terms(t: StageTrace) -> Terms:
        return (
            reduce(t.gradient_bytes, dp, across)
            + reduce(t.expert_gradient_bytes, of_experts, across),
            _operators_s(t.norm, wide, chip, shards)
            + _operators_s(t.expert_norm, wide, chip, expert_shards),
            _operators_s(t.update, wide, chip, shards)
            + _operators_s(t.expert_update, wide, chip, expert_shards),
            all_gather_s(t.training_bytes, shards, across)
            + all_gather_s(t.expert_training_bytes, expert_shards, across),
            t.flat_bytes,
        )

    return by_kind(traces, terms)


def _orthogonal_s(
    traces: StageTraces, shape: StageShape, wide: str, chip: ChipSpec, inside: Link, across: Link
) -> float:
    """Returns the seconds of Muon's products and gathers in a stage's slowest rank.

    All shards of the momentum are gathered in 16 bits; then each rank has the matrices that its
    shard has a part of, of which two are also others'.
    """
    if shape.optimizer != "muon":
        return 0.0
    shards = shape.dp if shape.zero_stage else 1
    terms = _orthogonal_terms(traces, shape.tp, chip, inside)
    gradient, matrix, count, all_s = for_blocks(terms, shape.layers)
    if shards == 1:
        return all_s
    share = min(1.0, gradient / shards / matrix + 1 / count)
    return all_gather_s(2 * gradient / ITEMSIZE[wide], shards, across) + share * all_s


@lru_cache(maxsize=65536)
def _orthogonal_terms(traces: StageTraces, tp: int, chip: ChipSpec, inside: Link) -> KindTerms:
    """Returns, for one layer and for two, the bytes of all gradients and of those of hidden
    matrices, the number of these, and the seconds of making all of them orthogonal.
    """

    def terms(t: StageTrace) -> Terms:
        pieces_s = sum(n * all_gather_s(size, tp, inside) for n, size in t.orthogonal.gather_bytes)
        seconds = pieces_s + _operators_s(t.orthogonal, "bfloat16", chip)
        return t.gradient_bytes, t.matrix_bytes, t.matrices, seconds

    return by_kind(traces, terms)


def _operators_s(piece: TracedPiece, dtype: str, chip: ChipSpec, shards: int = 1) -> float:
    """Returns the seconds of a piece's operators by the roofline rule that paces emulated chips,
    or as the chip's kernels are said to stay below it.

    `shards` ranks share the operators' work, but each launches all of them.
    """
    if chip.kernels is not None:
        return kernels_s(piece, dtype, chip, shards)
    launch_s, peak = chip.compute.launch_s, chip.peak_flops(dtype) * shards
    bandwidth = chip.memory.bandwidth_bytes_per_s * shards
    product_peak = peak * chip.compute.efficiency
    total_s = 0.0
    for number, product, flops, size_bytes in piece.operators:
        computing_s = flops / (product_peak if product else peak)
        moving_s = size_bytes / bandwidth
        total_s += number * (launch_s + (computing_s if computing_s > moving_s else moving_s))
    return total_s
