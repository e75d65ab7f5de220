"""Lower bounds on a simulated step."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from heteropp.cost.planned import group_links, stage_shape
from heteropp.cost.stage_time import StageShape, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.plan import Plan, ministage_layers
from heteropp.description.profile import ChipProfile, ProfileError, chip_profile
from heteropp.models.spec import ModelSpec
from heteropp.search.auto.freedom import Freedom
from heteropp.search.planner import Request

ROUNDING = 1e-9  # relative, of sums in another order


def busy_s(plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds that the busiest replica of a plan computes in a step."""
    most_s = 0.0
    for pipeline in plan.pipelines:
        held = ministage_layers(pipeline, plan.schedule)
        for s, stage in enumerate(pipeline.stages):
            count = pipeline.micro_batches * pipeline.parts(s)
            if plan.schedule == "chimera":  # a ministage has every other micro-batch
                count = count // 2
            alike = {}
            for replica in stage.replicas:
                alike[replica.chip, replica.batch_share] = replica.ranks[0]
            for rank in alike.values():
                shape = stage_shape(plan, rank)
                links = group_links(plan, cluster, rank)
                chip = cluster.chip(rank)
                profile = chip_profile(cluster, cluster.node(rank).chip_name)
                own_s = 0.0
                for first, last in held[s]:
                    own = replace(
                        shape,
                        layers=last - first,
                        first=first == 0,
                        last=last == plan.model.layers,
                        ministages=1,
                        blocks=plan.model.block_counts([(first, last)]),
                    )
                    time = stage_time(plan.model, own, chip, *links, profile)
                    own_s += count * time.micro_batch_s + time.norm_s + time.update_s
                most_s = max(most_s, own_s)
    return most_s


def step_bound_s(request: Request, freedom: Freedom, cluster: Cluster) -> float:
    """Returns seconds that no step of any plan on these chips, or on some of them, takes less than.

    Every block of every sequence, the model's two ends, and the update of every parameter are
    computed on some chip. If all chips worked all the time, and each did as much of everything as
    is best for all, the step would be done when the work is: priced in blocks, each of the other
    pieces costs at least what it costs on the type of chip on which it costs fewest blocks.
    """
    counts: Counter[str] = Counter()
    for node in cluster.nodes:
        counts[node.chip_name] += len(node.ranks)
    known = {
        node.chip_name: work
        for node in cluster.nodes
        if (work := _work(request.model, node.chip, *_asked(request, freedom, node.chip_name)))
    }
    if not known:
        return 0.0
    layers = request.model.layers
    ends = min(work.ends_s / work.block_s for work in known.values())
    update = min(work.update_s / work.block_s for work in known.values())
    blocks = request.global_batch * (layers + ends) + layers * update
    rate = sum(counts[name] / work.block_s for name, work in known.items())
    return blocks / rate * (1 - ROUNDING)


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
    optimizer: OptimizerName,
    sizes: tuple[int, ...],
    cuts: tuple[bool, ...],
    profile: ChipProfile | None,
) -> _Work | None:
    """Returns the least that a chip of a type takes; None where a profile knows nothing of it."""
    links = chip.links
    inside = Link(links.intra_node_latency_s, links.intra_node_bytes_per_s)
    # blocks that were measured together are no multiples of one
    counts = range(1, model.layers + 1) if profile else (1, 2)
    found: list[_Work] = []
    for tp, cut, size in itertools.product(model.tp_degrees(chip.tp_limit), cuts, sizes):
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
