"""Which rank a process is that srun or mpirun started: that of its chip."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from heteropp.api.errors import InputError
from heteropp.runtime.ranks.launchers import LauncherError, Task, be_rank, is_launched, own_task

if TYPE_CHECKING:
    from heteropp.description.cluster import Cluster
    from heteropp.description.plan import Plan


def launched() -> bool:
    """Whether a launcher started this process as one of several. Raises InputError."""
    try:
        return is_launched()
    except LauncherError as error:
        raise InputError(str(error)) from None


def take_place(cluster: Path | None, plan: Plan | None = None) -> bool:
    """Makes this process the rank of its chip; False: the plan leaves that one idle.

    Where the cluster's file names all of its nodes, the chip is the one with the process's number
    on the node that the launcher names. Else ranks are numbered as the launcher does it. plan:
    None where all of the cluster's chips take part. Raises FileError, InputError or PlanError.
    """
    task = own_task()
    if task is None:
        return True  # torchrun has said it
    try:
        return _take_place(task, cluster, plan)
    except LauncherError as error:
        raise InputError(str(error)) from None


def _take_place(task: Task, path: Path | None, plan: Plan | None) -> bool:
    from heteropp.description.cluster import read_cluster
    from heteropp.description.used_chips import used_cluster

    cluster = read_cluster(path) if path else None
    if cluster is None or not any(node.name for node in cluster.nodes):
        be_rank(task, task.number, task.count, task.local, task.first_node)
        return True
    if unnamed := [node.chip_name for node in cluster.nodes if not node.name]:
        raise InputError(
            f"{path}: nodes of {', '.join(unnamed)} have no name; expected one for each node, as "
            "others have one, or none at all"
        )
    member = _member(task, cluster)
    used = used_cluster(plan, cluster) if plan else cluster
    if member not in used.members:
        print(f"chip {member} is idle under this plan", file=sys.stderr)
        return False
    node = member.rpartition("/")[0]
    local = [own for own in used.members if own.rpartition("/")[0] == node].index(member)
    be_rank(task, used.rank(member), used.world_size, local, used.node_names[0])
    return True


def _member(task: Task, cluster: Cluster) -> str:
    """Returns the name of a task's chip. Raises InputError unless tasks and chips are as many."""
    if task.count != cluster.world_size:
        raise InputError(
            f"cluster {cluster.name} has {cluster.world_size} chips, and {task.count} processes "
            "were started; expected one for each chip"
        )
    node = next((n for n in (task.node, task.node.split(".")[0]) if n in cluster.node_names), None)
    if node is None:
        names = ", ".join(cluster.node_names)
        raise InputError(
            f"node {task.node} is not in cluster {cluster.name}; expected one of {names}"
        )
    slots = cluster.nodes[cluster.node_names.index(node)].slots
    if task.local >= len(slots):
        raise InputError(
            f"{task.local + 1} or more processes were started on node {node}, which has "
            f"{len(slots)} in cluster {cluster.name}; expected one for each chip"
        )
    return f"{node}/{slots[task.local]}"
