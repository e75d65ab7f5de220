"""The launcher that started this process as one of a job's, and the process's place among them.

torchrun says it in variables that torch and all else here read; srun and Open MPI's mpirun have
variables of their own, from which `be_rank` sets torchrun's.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
LAST_PORT = 65535
PORTS = range(20000, 30000)  # below those that operating systems give to whoever asks for any


class LauncherError(ValueError):
    """A launcher's variables that say no place; the message is one sentence."""


@dataclass(frozen=True)
class Task:
    """A process that srun or mpirun started beside others."""

    number: int  # from 0, over all nodes
    count: int  # of all nodes
    local: int  # its number on its node
    node: str  # its node's name, as the launcher has it
    several_nodes: bool
    first_node: str | None  # the name of task 0's; None: the launcher does not say
    job: str  # another for each start of tasks


def is_launched() -> bool:
    """Whether a launcher started this process as one of several. Raises LauncherError."""
    return "RANK" in os.environ or own_task() is not None


def is_torchruns() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def own_task() -> Task | None:
    """Returns what srun or mpirun started this process as; None where torchrun or nobody did.

    A single task is none: its program has the node for itself. Raises LauncherError.
    """
    if "RANK" in os.environ:
        return None
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # mpirun may have been started by srun
        task = _task_of_open_mpi()
    elif "SLURM_STEP_NUM_TASKS" in os.environ:  # a batch script has the other variables as well
        task = _task_of_slurm()
    else:
        return None
    return task if task.count > 1 else None


def be_rank(task: Task, rank: int, world_size: int, local_rank: int, first: str | None) -> None:
    """Makes this process a rank as torchrun would.

    local_rank: its number among the ranks of its node. first: the node of rank 0, where the job's
    store will be; MASTER_ADDR and MASTER_PORT, if they are set, are taken instead. Raises
    LauncherError.
    """
    if not task.several_nodes:
        first = LOOPBACK
    host = os.environ.get("MASTER_ADDR") or first
    if host is None:
        raise LauncherError(
            "MASTER_ADDR is missing: mpirun does not say which node has the first process; "
            "expected its address (mpirun -x MASTER_ADDR=...), or a cluster file with its nodes' "
            "names"
        )
    port = PORTS[zlib.crc32(task.job.encode()) % len(PORTS)]
    if given := os.environ.get("MASTER_PORT"):
        port = _number("MASTER_PORT")
        if not 1 <= port <= LAST_PORT:
            raise LauncherError(f"MASTER_PORT is {given!r}; expected from 1 to {LAST_PORT}")
    if rank == 0:
        _check_free(port)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        GROUP_WORLD_SIZE="2" if task.several_nodes else "1",  # or more: nobody asks how many
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does


def _check_free(port: int) -> None:
    """Raises LauncherError where the job's store cannot listen on a port of this machine."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise LauncherError(
            f"port {port} cannot be the job's store's: {os.strerror(error.errno or 0)}; "
            "MASTER_PORT may name another"
        ) from None


def _task_of_slurm() -> Task:
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    # The nodes of a heterogeneous job's step are sorted by name, and its tasks by group.
    nodes = os.environ.get("SLURM_JOB_NODELIST_HET_GROUP_0") or _text("SLURM_STEP_NODELIST")
    return Task(
        number=_number("SLURM_PROCID"),
        count=_number("SLURM_STEP_NUM_TASKS"),
        local=_number("SLURM_LOCALID"),
        node=_text("SLURMD_NODENAME"),
        several_nodes=_number("SLURM_STEP_NUM_NODES") > 1,
        first_node=first_of(nodes),
        job=f"{job}.{_text('SLURM_STEP_ID')}.{restart}",
    )


def _task_of_open_mpi() -> Task:
    count = _number("OMPI_COMM_WORLD_SIZE")
    return Task(
        number=_number("OMPI_COMM_WORLD_RANK"),
        count=count,
        local=_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        node=socket.gethostname(),
        several_nodes=_number("OMPI_COMM_WORLD_LOCAL_SIZE") < count,
        first_node=None,
        job=_text("PMIX_NAMESPACE"),
    )


def first_of(nodes: str) -> str:
    """Returns the first name of a list of Slurm's, gpu07 of "gpu[07-09,12],cpu1" say."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise LauncherError(f"the list of nodes is {nodes!r}; expected names, such as gpu[07-09]")
    return re.sub(r"\[([^],-]+)[^\]]*\]", r"\1", first[0])


def _number(variable: str) -> int:
    text = _text(variable)
    if not (text.isascii() and text.isdigit()):
        raise LauncherError(f"{variable} is {text!r}; expected a whole number")
    return int(text)


def _text(variable: str) -> str:
    if not (text := os.environ.get(variable)):
        raise LauncherError(
            f"{variable} is missing; expected from the launcher of this process, which set others"
        )
    return text
