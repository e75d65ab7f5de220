"""Whether the plans of a run of mixed lengths fit: all of them leave something standing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heteropp.cost.documents import apart_bytes, given_bytes
from heteropp.cost.planned import human_bytes, rank_memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, PlanError, ministage_layers
from heteropp.description.sections import sections_of
from heteropp.layout.flat_buffer import Layout, layout
from heteropp.runtime.mixed_lengths.parameters import alike

MOVING = 3  # copies of gradients under way: what leaves, what comes, and what that is taken to


def check_together(plans: Sequence[Plan], cluster: Cluster) -> None:
    """`plans` by length. Raises PlanError naming the rank that overruns its chip most."""
    lacking = [
        (need - cluster.chip(rank).memory.capacity_bytes, -rank, need, plan)
        for plan, needs in zip(plans, memory_bytes(plans, cluster), strict=True)
        for rank, need in enumerate(needs)
    ]
    excess, rank, need, plan = max(lacking, key=lambda each: each[:2])
    if excess > 0:
        chip = cluster.chip(-rank)
        raise PlanError(
            f"with what all {len(plans)} plans leave standing, the one of sequence_length "
            f"{plan.model.sequence_length} needs {human_bytes(need)} on rank {-rank} (chip "
            f"{cluster.node(-rank).chip_name}), which has "
            f"{human_bytes(chip.memory.capacity_bytes)}"
        )


def memory_bytes(plans: Sequence[Plan], cluster: Cluster | None = None) -> list[list[int]]:
    """Predicted peaks by plan and rank, while that plan is at work."""
    home, *away = plans
    memories = [rank_memory(plan, cluster) for plan in plans]
    copies = [_copy_bytes(home, plan) for plan in away]
    result = []
    for at_work, own in enumerate(memories):
        needs = []
        for rank, memory in enumerate(own):
            first = memories[0][rank]
            gradients = first.gradients if at_work == 0 else _gradient_bytes(home, rank)
            standing = first.parameters + gradients + first.optimizer + memory.framework
            standing += sum(copy[rank][0] + copy[rank][1] for copy in copies)
            standing += sum(each[rank].constants + each[rank].tokens for each in memories)
            standing += sum(given_bytes(plan, rank) for plan in plans)
            moving = MOVING * copies[at_work - 1][rank][1] if at_work else 0
            working = memory.kept + memory.working + memory.boundary
            working += apart_bytes(plans[at_work], rank)
            needs.append(standing + max(working, moving))
        result.append(needs)
    return result


def _copy_bytes(home: Plan, plan: Plan) -> list[tuple[int, int]]:
    """Returns, for each rank, the bytes of a plan's own parameters and of their gradients: (0, 0)
    where the rank computes with home's.
    """
    ranks = range(plan.world_size)
    return [
        (0, 0)
        if alike(home, plan, rank)
        else (_parameter_bytes(plan, rank), _gradient_bytes(plan, rank))
        for rank in ranks
    ]


def _parameter_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of all parameters, frozen ones included."""
    elements = sum(buffer.whole_size for buffer in _buffers(plan, rank))
    return elements * plan.model.dtype_bytes


def _gradient_bytes(plan: Plan, rank: int) -> int:
    elements = sum(buffer.size for buffer in _buffers(plan, rank))
    return elements * max(4, plan.model.dtype_bytes)


def _buffers(plan: Plan, rank: int) -> Iterator[Layout]:
    p, s, _, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    for layers in ministage_layers(plan.pipelines[p], plan.schedule)[s]:
        for section in sections_of(stage, tp_index, rank):
            yield layout(plan.model, layers, stage.tp, tp_index, 1, section.experts)
