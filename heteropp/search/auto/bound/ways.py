"""The ways in which chips of one type may work on a model, and the seconds that each takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy

from heteropp.cost.planned import link_inside
from heteropp.cost.stage_time import StageShape, Time, stage_time
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
    tensor-parallel degree, whether rows are cut over it, and the sequences in a replica.
    """

    chip_s: numpy.ndarray  # chip-seconds of a piece for one sequence, forward and backward
    # seconds from when a replica begins a piece's forward until it has the gradient of the piece's
    # input, without what lies between: nothing else goes on with these sequences meanwhile
    chain_s: numpy.ndarray
    update_s: numpy.ndarray  # chip-seconds to update a piece's parameters, norm included


@lru_cache(maxsize=4096)
def ways(
    model: ModelSpec,
    chip: ChipSpec,
    chips: int,
    optimizer: OptimizerName,
    sizes: tuple[Sizes, ...],
    cuts: tuple[bool, ...],
    parts: int,
    profile: ChipProfile | None,
) -> Ways | None:
    """Returns the ways of a chip type; None where a profile knows none.

    chips: of the largest node. cuts: whether rows are cut over tensor-parallel ranks. parts: of a
    sequence, at most, that context-parallel groups take.

    A sequence takes no longer among many than among few, and that is said of a range of sizes: a
    replica computes a sequence as fast as with the most of them, but takes at least as long for all
    of its sequences as the fewest then do.

    Context-parallel groups together have no less work than one, each operator being launched by all
    of them; but of attention's scores, where these are kept, a group has only those of keys up to
    its last token: over n parts no less than (1 + 1 / n) / 2 of the square. And a sequence takes as
    long as its slowest part, which is no less than their mean.
    """
    work = 1.0 if parts == 1 or keeps_no_scores(model) else (1 + 1 / parts) / 2
    rows: list[numpy.ndarray] = []
    degrees = model.tp_degrees(min(chips, chip.tp_limit))
    for tp, cut, (fewest, most) in itertools.product(degrees, cuts, sizes):
        if cut and tp == 1:
            continue
        # latency is left out of a range, as short messages take fewer of them than long ones, and
        # parts have shorter messages
        inside = link_inside(chip, tp)
        if fewest < most or parts > 1:
            inside = replace(inside, latency_s=0.0)
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
            pieces = numpy.array(list(_pieces(model, shape, chip, inside, profile)))
            scale = tp / most * work, fewest / most * work / parts, tp
            rows.append(pieces.T * numpy.array(scale)[:, None])
    return Ways(*numpy.stack(rows, axis=1)) if rows else None


def _pieces(
    model: ModelSpec, shape: StageShape, chip: ChipSpec, inside: Link, profile: ChipProfile | None
) -> Iterator[tuple[float, float, float]]:
    """Yields the three seconds of each piece, of a replica and all its sequences."""

    def times(layers: int, kind: str, end: str = "") -> numpy.ndarray:
        blocks = ((kind, layers),)
        own = replace(shape, layers=layers, blocks=blocks, first=end == "first", last=end == "last")
        return _seconds(stage_time(model, own, chip, inside, inside, profile))

    kinds = [kind for kind, _ in model.block_counts([(0, model.layers)])]
    # blocks that were measured together are no multiples of one
    counts = range(1, model.layers + 1) if profile else (1, 2)
    for kind in kinds:
        more = [numpy.zeros(3), *(times(n, kind) for n in counts)]
        added = [after - before for before, after in itertools.pairwise(more)]
        yield tuple(numpy.maximum(0.0, numpy.min(added, axis=0)))
    # beside many blocks, a host that issues operators late may hide some of an end's
    beside = (1, model.layers) if chip.kernels else (1,)
    for end in ("first", "last"):
        added = [times(n, kind, end) - times(n, kind) for kind in kinds for n in beside]
        yield tuple(numpy.maximum(0.0, numpy.min(added, axis=0)))


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
