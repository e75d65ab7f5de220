"""The ways in which chips of one type may work on a model, and the seconds that each takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy

from heteropp.cost.planned import collective_link
from heteropp.cost.stage_time import StageShape, Time, stage_time
from heteropp.cost.tracing.kind import Spread
from heteropp.cost.tracing.scores import keeps_no_scores
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Link
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.profile import ChipProfile, ProfileError
from heteropp.models.spec import ModelSpec

EACH = 8  # sequences in a replica, up to which each number is a way of its own
Sizes = tuple[int, int]  # sequences in a replica, from and to


@dataclass(frozen=True, eq=False)
class Ways:
    """What a chip of one type takes at least, by way and by piece of the model.

    The pieces are a block of each kind, then the embedding, then the head. A way is a
    tensor-parallel degree, whether rows are cut over it, and the sequences in a replica. Where
    experts may lie over ranks, those of a block are no part of it but apart.
    """

    chip_s: numpy.ndarray  # chip-seconds of a piece for one sequence, forward and backward
    # seconds from when a replica begins a piece's forward until it has the gradient of the piece's
    # input, without what lies between: nothing else goes on with these sequences meanwhile
    chain_s: numpy.ndarray
    update_s: numpy.ndarray  # chip-seconds to update a piece's parameters, norm included
    expert_s: numpy.ndarray  # chip-seconds of a piece's experts for one sequence, where apart

    @property
    def block_s(self) -> numpy.ndarray:
        """Chip-seconds of a block of the first kind with its experts, by way."""
        block_s: numpy.ndarray = self.chip_s[:, 0] + self.expert_s[:, 0]
        return block_s


@lru_cache(maxsize=4096)
def ways(
    model: ModelSpec,
    chip: ChipSpec,
    chips: int,
    pair: Link,
    optimizer: OptimizerName,
    sizes: tuple[Sizes, ...],
    cuts: tuple[bool, ...],
    parts: int,
    profile: ChipProfile | None,
    spread: bool = False,
) -> Ways | None:
    """Returns the ways of a chip type; None where a profile knows none.

    chips: of the largest node. pair: a link no slower than any between two chips of such a node.
    cuts: whether rows are cut over tensor-parallel ranks. parts: of a sequence, at most, that
    context-parallel groups take, or a rank in turn. spread: whether experts may lie over ranks.

    A sequence takes no longer among many than among few, and that is said of a range of sizes: a
    replica computes a sequence as fast as with the most of them, but takes at least as long for all
    of its sequences as the fewest then do.

    Context-parallel groups together have no less work than one, each operator being launched by all
    of them, and slices no less than whole sequences; but of attention's scores, where these are
    kept, a part has only those of keys up to its last token: over n parts no less than
    (1 + 1 / n) / 2 of the square. And a sequence takes as long as its slowest part, which is no
    less than their mean.
    """
    work = 1.0 if parts == 1 or keeps_no_scores(model) else (1 + 1 / parts) / 2
    rows: list[numpy.ndarray] = []
    if spread and chip.kernels is not None:  # what its host hides may be experts' or not
        chip = replace(chip, kernels=replace(chip.kernels, host_s=0.0))
    degrees = model.tp_degrees(min(chips, chip.tp_limit))
    for tp, cut, (fewest, most) in itertools.product(degrees, cuts, sizes):
        if cut and tp == 1:
            continue
        # latency is left out of a range, as short messages take fewer of them than long ones, and
        # parts have shorter messages
        inside = collective_link(chip, tp) or pair
        if fewest < most or parts > 1:
            inside = inside._replace(latency_s=0.0)
        shape = StageShape(
            layers=1,
            first=False,
            last=False,
            tp=tp,
            dp=1,
            sequences=most,
            zero_stage=0,
            optimizer=optimizer,
            recompute=False,
            sequence_parallel=cut,
        )
        with suppress(ProfileError):
            pieces = numpy.array(list(_pieces(model, shape, chip, inside, profile, spread)))
            scale = tp / most * work, fewest / most * work / parts, tp, tp / most
            rows.append(pieces.T * numpy.array(scale)[:, None])
    return Ways(*numpy.stack(rows, axis=1)) if rows else None


def _pieces(
    model: ModelSpec,
    shape: StageShape,
    chip: ChipSpec,
    inside: Link,
    profile: ChipProfile | None,
    spread: bool,
) -> Iterator[tuple[float, ...]]:
    """Yields the three seconds of each piece, of a replica and all its sequences, and those of its
    experts, where these are apart.
    """

    def times(layers: int, kind: str, end: str = "", held: Spread | None = None) -> numpy.ndarray:
        blocks = ((kind, layers),)
        own = replace(shape, layers=layers, blocks=blocks, first=end == "first", last=end == "last")
        if held is not None:
            own = replace(own, spread=held, dp=len(held.shares))
        return _seconds(stage_time(model, own, chip, inside, inside, profile))

    kinds = [kind for kind, _ in model.block_counts([(0, model.layers)])]
    # blocks that were measured together are no multiples of one
    counts = range(1, model.layers + 1) if profile else (1, 2)
    for kind in kinds:
        more = [numpy.zeros(4)]
        for n in counts:
            least_s = most_s = numpy.zeros(3)
            if spread:
                least_s, most_s = _experts_s(model, kind, partial(times, n, kind, ""))
            more.append(numpy.append(times(n, kind) - most_s, least_s[0]))
        added = [after - before for before, after in itertools.pairwise(more)]
        yield tuple(numpy.maximum(0.0, numpy.min(added, axis=0)))
    # beside many blocks, a host that issues operators late may hide some of an end's
    beside = (1, model.layers) if chip.kernels else (1,)
    for end in ("first", "last"):
        added = [times(n, kind, end) - times(n, kind) for kind in kinds for n in beside]
        yield *numpy.maximum(0.0, numpy.min(added, axis=0)), 0.0


def _experts_s(
    model: ModelSpec, kind: str, times: Callable[[Spread], numpy.ndarray]
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns the least and the most of each three seconds that are those of a block's experts, but
    for updates, of which each chip does at most its part.

    times: what a block takes where a rank has some of the experts, and no rows but its own. What
    all of them take longer than one does is the others', and each takes as long, but for the
    rounding of its rows.
    """
    experts, layer = model.expert_count, _layer_of(model, kind)
    if not any(map(model.is_of_experts, model.parameters((layer, layer + 1)))):
        return numpy.zeros(3), numpy.zeros(3)
    one, every = (times(Spread((n, experts - n), (1, 0))) for n in (1, experts))
    all_s = (every - one) * experts / (experts - 1) * (1.0, 1.0, 0.0)
    rounding = 2 * experts / model.sequence_length if model.sequence_length % experts else 0.0
    return all_s * max(0.0, 1 - rounding), all_s * (1 + rounding)


def _layer_of(model: ModelSpec, kind: str) -> int:
    return next(layer for layer in range(model.layers) if model.block_kind(layer) == kind)


def _seconds(time: Time) -> numpy.ndarray:
    return numpy.array(
        [time.micro_batch_s, time.forward_s + time.backward_input_s, time.norm_s + time.update_s]
    )


def sizes(least: int, batch: int) -> tuple[Sizes, ...]:
    """Returns ranges that hold every number of sequences that a replica may have.

    least: of which they are multiples.
    """
    found, last = [], 0
    while last < batch // least:
        first = last + 1
        last = first if first <= EACH else min(last + last // 2, batch // least)
        found.append((first * least, last * least))
    return tuple(found)
