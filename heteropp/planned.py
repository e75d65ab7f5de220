"""The cost of every rank of a plan on a cluster: seconds, bytes, and whether it fits."""

from __future__ import annotations

from heteropp.cluster import Cluster, Link
from heteropp.cost import Memory, StageShape, Time, stage_memory, stage_time
from heteropp.inboxes import received_ahead
from heteropp.memory import put_off_share
from heteropp.plan import Pipeline, Plan, PlanError, ministage_layers
from heteropp.profile import chip_profile
from heteropp.schedule import in_flight


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
                    found = cluster.node(rank).chip_name
                    if found != replica.chip:
                        raise PlanError(
                            f"pipelines[{p}].stages[{s}] expects chip {replica.chip} at rank "
                            f"{rank}; cluster {cluster.name} has {found} there"
                        )


def rank_times(plan: Plan, cluster: Cluster) -> list[Time]:
    """Predicted seconds, by rank."""
    result = []
    for rank in range(plan.world_size):
        shape = stage_shape(plan, rank)
        links = group_links(plan, cluster, rank)
        profile = chip_profile(cluster, cluster.node(rank).chip_name)
        result.append(stage_time(plan.model, shape, cluster.chip(rank), *links, profile))
    return result


def rank_memory(plan: Plan, cluster: Cluster | None = None) -> list[Memory]:
    """Predicted peak bytes, by rank; the cluster may be a measured one."""
    memory: dict[int, Memory] = {}
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            alike: dict[tuple[int, str], Memory] = {}
            for replica in stage.replicas:
                key = replica.batch_share, replica.chip
                if key not in alike:
                    shape = _shape(plan, pipeline, s, replica.batch_share)
                    profile = chip_profile(cluster, replica.chip)
                    share = put_off_share(plan.model, shape, profile)
                    held = in_flight(plan.schedule, pipeline, s, share)
                    alike[key] = stage_memory(
                        plan.model, shape, held, pipeline.micro_batches * pipeline.parts(s), profile
                    )
                memory.update(dict.fromkeys(replica.ranks, alike[key]))
    return [memory[rank] for rank in range(plan.world_size)]


def check_memory(plan: Plan, cluster: Cluster) -> None:
    """Raises PlanError naming the stage that overruns its chips most, the need and the capacity."""
    worst = max(
        (memory.total - cluster.chip(rank).memory.capacity_bytes, -rank)
        for rank, memory in enumerate(rank_memory(plan, cluster))
    )
    if worst[0] <= 0:
        return
    rank = -worst[1]
    capacity = cluster.chip(rank).memory.capacity_bytes
    raise PlanError(overrun(plan, rank, worst[0] + capacity, capacity))


def overrun(plan: Plan, rank: int, need: int, capacity: int) -> str:
    p, s, r, _ = plan.place(rank)
    chip = plan.pipelines[p].stages[s].replicas[r].chip
    return (
        f"stage {s} needs {human_bytes(need)} on rank {rank} (chip {chip}), "
        f"which has {human_bytes(capacity)}"
    )


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def stage_shape(plan: Plan, rank: int) -> StageShape:
    p, s, r, _ = plan.place(rank)
    share = plan.pipelines[p].stages[s].replicas[r].batch_share
    return _shape(plan, plan.pipelines[p], s, share)


def _shape(plan: Plan, pipeline: Pipeline, s: int, sequences: int) -> StageShape:
    stage = pipeline.stages[s]
    held = ministage_layers(pipeline, plan.schedule)[s]  # where a V ends, so does the model
    ways = 2 if plan.schedule == "chimera" else 1
    return StageShape(
        layers=sum(last - first for first, last in held),
        first=any(first == 0 for first, _ in held),
        last=any(last == plan.model.layers for _, last in held),
        tp=stage.tp,
        dp=stage.dp,
        sequences=sequences,
        zero_stage=plan.zero_stage,
        recompute=stage.recompute,
        ministages=stage.ministages,
        schedule=plan.schedule,
        offload=stage.offload,
        awaited=_awaited(plan, pipeline, s),
        copies=len(plan.pipelines) * ways,
        copy=plan.pipelines.index(pipeline) * ways,
        sequence_parallel=stage.sequence_parallel,
        selective_recompute=stage.selective_recompute,
    )


def _awaited(plan: Plan, pipeline: Pipeline, s: int) -> int | None:
    """In all its inboxes; of one ministage in a pipeline of like micro-batches, one in each."""
    alike = all(pipeline.parts(t) == 1 for t in range(len(pipeline.stages)))
    if pipeline.stages[s].ministages == 1 and alike:
        return None
    ahead = received_ahead(plan.schedule, pipeline)
    return sum(count for (t, *_), count in ahead.items() if t == s)


def group_links(plan: Plan, cluster: Cluster, rank: int) -> tuple[Link, Link]:
    """The slowest links inside a rank's tensor-parallel group and across its stage's replicas."""
    p, s, r, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    inside = stage.replicas[r].ranks
    across = tuple(replica.ranks[tp_index] for replica in stage.replicas)
    return slowest_link(cluster, rank, inside), slowest_link(cluster, rank, across)


def slowest_link(cluster: Cluster, rank: int, group: tuple[int, ...]) -> Link:
    links = [cluster.link(rank, peer) for peer in group if peer != rank]
    return min(links, key=lambda link: link.bytes_per_s, default=Link(0.0, float("inf")))
