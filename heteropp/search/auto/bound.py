"""A lower bound on the simulated step of every plan for a request."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from heteropp.cost.stage_time import StageShape, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.profile import ChipProfile, ProfileError, chip_profile
from heteropp.models.spec import ModelSpec
from heteropp.search.auto.freedom import Freedom
from heteropp.search.planner import Request

ROUNDING = 1e-9  # relative, of sums in another order
BISECTIONS = 50


def step_bound_s(request: Request, freedom: Freedom, cluster: Cluster) -> float:
    """Returns seconds that no step of any plan on these chips, or on some of them, takes less than.

    Every block of every sequence, the model's two ends, and the update of every parameter are
    computed on some chip. If all chips worked all the time, and each did as much of everything as
    is best for all, the step would be done when the work is: priced in blocks, each of the other
    pieces costs at least what it costs on the type of chip on which it costs fewest blocks. And a
    node computes no more than its NICs let it.
    """
    nodes = Counter((node.chip_name, node.chip, len(node.ranks)) for node in cluster.nodes)
    largest: dict[str, int] = {}  # node of each chip type
    for name, _, chips in nodes:
        largest[name] = max(chips, largest.get(name, 0))
    known = {
        name: work
        for name, chip, _ in nodes
        if (work := _work(request.model, chip, largest[name], *_asked(request, freedom, name)))
    }
    if not known:
        return 0.0
    layers = request.model.layers
    ends = min(work.ends_s / work.block_s for work in known.values())
    update = min(work.update_s / work.block_s for work in known.values())
    blocks = request.global_batch * (layers + ends) + layers * update
    kinds = [
        _NodeKind.of(request.model, chip, chips, known[name].block_s, count, layers + ends)
        for (name, chip, chips), count in nodes.items()
        if name in known
    ]
    low_s, high_s = 0.0, blocks / sum(kind.count * kind.computed_per_s for kind in kinds)
    while _most_blocks(kinds, high_s) < blocks:
        low_s, high_s = high_s, 2 * high_s
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if _most_blocks(kinds, middle_s) < blocks:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s * (1 - ROUNDING)


@dataclass(frozen=True)
class _NodeKind:
    """What a node, or each of several that are alike, can do at most."""

    count: int
    computed_per_s: float  # blocks that its chips compute
    passed_per_s: float  # blocks of the sequences whose boundary tensors its NICs pass
    summed_s: float  # to sum the gradients of the whole model with another node

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        chip: ChipSpec,
        chips: int,
        block_s: float,
        count: int,
        blocks: float,
    ) -> _NodeKind:
        """blocks: of a sequence, in all."""
        links = chip.links
        nics_bytes_per_s = min(links.nics_per_node, chips) * links.nic_bytes_per_s
        boundary_bytes = model.sequence_length * model.hidden * model.dtype_bytes
        width = max(4, model.dtype_bytes)
        gradient_bytes = width * sum(math.prod(p.shape) for p in model.all_parameters if p.trains)
        return cls(
            count=count,
            computed_per_s=chips / block_s,
            passed_per_s=nics_bytes_per_s / boundary_bytes * blocks,
            summed_s=gradient_bytes / 2 / nics_bytes_per_s,
        )


def _most_blocks(kinds: list[_NodeKind], step_s: float) -> float:
    """Returns the most blocks of sequences that nodes compute in a step of so many seconds.

    A node that does not hold the whole model sends or receives a boundary tensor of every sequence
    that it works on, and its gradient the other way. Nodes that hold the whole model sum their
    gradients: of these, one alone has no one to sum them with.
    """
    whole = [kind.count * kind.computed_per_s * step_s for kind in kinds]
    part = [kind.count * min(kind.computed_per_s, kind.passed_per_s) * step_s for kind in kinds]
    several = sum(
        one if kind.summed_s <= step_s else other
        for kind, one, other in zip(kinds, whole, part, strict=True)
    )
    gains = [
        (one - other) / kind.count for kind, one, other in zip(kinds, whole, part, strict=True)
    ]
    return max(several, sum(part) + max(gains))


@dataclass(frozen=True)
class _Work:
    """Chip-seconds at least, on one type of chip."""

    block_s: float  # of one block of one sequence
    ends_s: float  # of embedding and head, of one sequence
    update_s: float  # of a block's parameters, norm included


def _asked(
    request: Request, freedom: Freedom, name: str
) -> tuple[OptimizerName, tuple[int, ...], tuple[bool, ...], ChipProfile | None]:
    """Returns what `_work` asks for of a chip type, beside the model and the chip.

    A chip's seconds a sequence fall with the sequences of its micro-batch, so that all at once are
    the best, where nothing says otherwise.
    """
    profile = chip_profile(request.cluster, name)
    sizes = {request.global_batch}
    if profile is not None:
        sizes = {sequences for *_, sequences in profile.found}
    return request.optimizer, tuple(sorted(sizes)), freedom.sequence_parallel, profile


@lru_cache(maxsize=4096)
def _work(
    model: ModelSpec,
    chip: ChipSpec,
    chips: int,
    optimizer: OptimizerName,
    sizes: tuple[int, ...],
    cuts: tuple[bool, ...],
    profile: ChipProfile | None,
) -> _Work | None:
    """Returns the least that a chip of a type takes; None where a profile knows nothing of it.

    chips: of the largest node.
    """
    links = chip.links
    inside = Link(links.intra_node_latency_s, links.intra_node_bytes_per_s)
    # blocks that were measured together are no multiples of one
    counts = range(1, model.layers + 1) if profile else (1, 2)
    found: list[_Work] = []
    for tp, cut, size in itertools.product(
        model.tp_degrees(min(chips, chip.tp_limit)), cuts, sizes
    ):
        if cut and tp == 1:
            continue
        shape = StageShape(
            layers=1,
            first=False,
            last=False,
            tp=tp,
            dp=1,
            sequences=size,
            zero_stage=0,
            optimizer=optimizer,
            recompute=False,
            sequence_parallel=cut,
        )
        wanted = [replace(shape, layers=n) for n in counts]
        wanted += [replace(shape, first=True), replace(shape, last=True)]
        with suppress(ProfileError):
            times = [stage_time(model, each, chip, inside, inside, profile) for each in wanted]
            *blocks, first, last = times
            one_s = _least_more([time.micro_batch_s for time in blocks])
            step_s = _least_more([time.norm_s + time.update_s for time in blocks])
            ends = [max(0.0, end.micro_batch_s - blocks[0].micro_batch_s) for end in (first, last)]
            found.append(_Work(tp / size * one_s, tp / size * sum(ends), tp * step_s))
    if not found or min(work.block_s for work in found) <= 0:
        return None
    return _Work(
        min(work.block_s for work in found),
        min(work.ends_s for work in found),
        min(work.update_s for work in found),
    )


def _least_more(seconds: list[float]) -> float:
    """Returns the least that one more block adds, from none on."""
    return max(0.0, min(more - fewer for fewer, more in itertools.pairwise([0.0, *seconds])))
