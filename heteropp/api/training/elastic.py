"""What `heteropp-train --elastic` does: a leader and an agent of all nodes, in one process.

Under torchrun each of its processes is the agent of one node, and rank 0 the leader as well.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from heteropp.api.errors import InputError
from heteropp.api.training.elastic_screen import Screen
from heteropp.cost.capacity import check_memory
from heteropp.cost.planned import check_cluster
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.files import read_json, write_json
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.used_chips import used_cluster
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.decisions.state import silence_s
from heteropp.elastic.job import Board, Job, Meeting
from heteropp.elastic.launcher.agent import Agent
from heteropp.elastic.launcher.availability import Availability
from heteropp.elastic.launcher.gathering import GatheringError, gather
from heteropp.elastic.launcher.leader import Leader
from heteropp.elastic.launcher.pulse import Heart, Pulse
from heteropp.elastic.lease import LeaseTimer
from heteropp.elastic.member.member import run_member
from heteropp.elastic.messages import JobOutcome
from heteropp.runtime.ranks.agreement import unlike_terms, warn_of_unlike_torch
from heteropp.runtime.ranks.attempt import COME_S, launcher_store
from heteropp.runtime.ranks.launch import set_environment
from heteropp.runtime.ranks.loopback import loopback_store
from heteropp.runtime.ranks.secret import draw_secret
from heteropp.runtime.ranks.store import StoreSilentError, naming_silent_store
from heteropp.runtime.ranks.watch import SIGNALS
from heteropp.runtime.training_run import TrainingRun

TURN_S = 0.1
CLEAR_S = 60.0  # for the remote store to remove what the job kept
LEAVE_S = 10.0  # for the other agents to hear that the job is over
JOB = "job.json"
GENERATIONS = "generations"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What the command line says besides what to train."""

    cluster: Path
    node_name: str | None  # under torchrun: whose agent this is
    availability: str | None
    notice_s: float
    disk: Path | None
    remote: str | None
    keep_memory_every: int
    keep_disk_every: int
    keep_remote_every: int


@dataclass(frozen=True)
class Earlier:
    """job.json in the output: what a run goes on from."""

    name: str
    hyperparameters: Hyperparameters
    torchrun: str | None  # its run id, where it started the job

    @property
    def goes_on(self) -> bool:
        """Whether the torchrun that started this process started the job, and does so again."""
        return self.torchrun is not None and self.torchrun == _torchrun()


def job_goes_on(output: Path) -> bool:
    """Whether torchrun starts the job in this folder again by itself. Raises FileError."""
    path = output / JOB
    return path.exists() and read_json(path, Earlier).goes_on


def earlier_job(output: Path, resume: bool) -> Earlier | None:
    """The job whose snapshots this one takes: torchrun starts again by itself, others on --resume.

    Raises FileError, and InputError where there is a job that is not to be resumed.
    """
    path = output / JOB
    if not path.exists():
        return None
    earlier = read_json(path, Earlier)
    if resume or earlier.goes_on:
        return earlier
    raise InputError(
        f"{path} is of an earlier run; give --resume to go on from it, or another --output"
    )


@dataclass(frozen=True, kw_only=True)
class JobProcess:
    """The place of this process in the job."""

    store: dist.Store
    meeting: Meeting
    name: str  # the job's
    nodes: Collection[str]  # that have an agent
    own: Sequence[str]  # of them, that this process is the agent of
    leads: bool


def train_elastically(
    run: TrainingRun, elastic: Elastic, earlier: Earlier | None, quiet: bool
) -> int:
    """Trains on the chips that there are, whichever they are; gives the exit code.

    quiet: standard output gets the summary alone, as JSON. Raises FileError, InputError, PlanError.
    """
    cluster = read_cluster(elastic.cluster)
    set_environment()
    launched = _torchrun() is not None
    if launched:
        try:
            with naming_silent_store(os.environ["MASTER_ADDR"], run.deadline_s):
                place = _under_torchrun(elastic, earlier, cluster, run)
        except StoreSilentError as error:
            raise InputError(f"node {elastic.node_name} stopped: {error}") from None
    else:
        place = _alone(earlier, cluster, run)
    job = Job(
        name=place.name,
        run=run,
        meeting=place.meeting,
        memory=SHARED_MEMORY / f"heteropp-{place.name}",
        disk=elastic.disk or run.output / "copies",
        remote=elastic.remote,
        keep_memory_every=elastic.keep_memory_every,
        keep_disk_every=elastic.keep_disk_every,
        keep_remote_every=elastic.keep_remote_every,
    )
    is_leased = len(place.nodes) > len(place.own)
    agent = Agent(job, place.own, Board(place.store), run_member, is_leased)
    outcome = JobOutcome(1)
    try:
        with _signals() as told:
            if place.leads:
                outcome = _lead(job, elastic, cluster, place, agent, told, earlier, quiet)
            else:
                outcome = _serve(agent, place, told)
    except StoreSilentError as error:
        print(f"node {place.own[0]} stopped: {error}", file=sys.stderr, flush=True)
    finally:
        agent.close()
        if outcome.exit_code:
            agent.save_memory()
        else:
            agent.clear_disk()
            if elastic.disk is None:
                with suppress(OSError):  # of other nodes
                    job.disk.rmdir()
        if not (launched and told):  # torchrun ends a start to begin another
            agent.clear_memory()
    return outcome.exit_code


def _lead(
    job: Job,
    elastic: Elastic,
    cluster: Cluster,
    place: JobProcess,
    agent: Agent,
    told: list[int],
    earlier: Earlier | None,
    quiet: bool,
) -> JobOutcome:
    """Leads the job until it is over, and returns how it ended.

    A signal ends the job after the running step, and a second signal at once. Under torchrun the
    first signal ends it at once, as does torchrun's death: torchruns that live then begin another
    start, on other nodes. Raises StoreSilentError.
    """
    patience = 2 if _torchrun() is None else 1
    launcher = os.getppid()
    availability = Availability(elastic.availability, cluster) if elastic.availability else None
    chips = availability.chips if availability else None
    roster = Roster.of(cluster.members, chips, place.nodes)
    members = _check_plan(job.run, cluster, roster)
    if not earlier:
        shutil.rmtree(job.run.output / GENERATIONS, ignore_errors=True)
    write_json(job.run.output / JOB, Earlier(job.name, job.run.hyperparameters, _torchrun()))
    screen = Screen(job.run.steps, quiet)
    board, others = Board(place.store), set(place.nodes) - set(place.own)
    meeting = place.meeting
    pulse = Pulse(board, others, silence_s(job.run.deadline_s), screen.tell)
    leader = Leader(
        job,
        cluster,
        roster,
        place.store,
        pulse,
        availability,
        elastic.notice_s,
        screen.tell,
        agent.forget_memory if len(place.own) > 1 else None,
        "recover" if earlier else "initial",
        members,
    )
    outcome: JobOutcome | None = None
    heart = _heart(agent, place)
    try:
        while leader.outcome is None and len(told) < patience:
            if _torchrun() and os.getppid() != launcher:
                outcome = JobOutcome(1, "torchrun died, which started this process")
                break
            if told:
                leader.stop(JobOutcome(128 + told[0]))
            with naming_silent_store(meeting.host, meeting.answer_s):
                agent.turn()
                leader.turn()
            screen.update(leader)
            agent.wait(TURN_S)
    finally:
        if heart:
            heart.stop()
        screen.stop()
        if availability:
            availability.close()
    outcome = outcome or leader.outcome or JobOutcome(128 + told[0], "told to stop at once")
    board.say(outcome.exit_code, "over")
    for node in pulse.answering():  # the store may end with this process
        with suppress(dist.DistStoreError):
            board.hear(str, "left", node, timeout_s=LEAVE_S)
    if outcome.exit_code == 0 and job.remote:
        _clear_remote(job, screen)
    screen.finish(leader, outcome, board.heard(str, "summary"))
    return outcome


def _clear_remote(job: Job, screen: Screen) -> None:
    """Removes what is kept in the remote store: the last step has a checkpoint."""
    (tier,) = (tier for tier in job.tiers_of("").each() if tier.kind == "remote")
    failures: list[str] = []

    def clear() -> None:
        try:
            tier.clear()
        except Exception as error:  # of whatever store
            failures.append(" ".join(str(error).split()))

    clearing = threading.Thread(target=clear, name="clear-remote", daemon=True)
    clearing.start()
    clearing.join(CLEAR_S)  # a store that is gone may never answer
    if clearing.is_alive():
        failures.append(f"no answer in {CLEAR_S:g} s")
    if failures:
        screen.tell(f"warning: {tier.url} cannot be removed: {failures[0]}")


def _serve(agent: Agent, place: JobProcess, told: list[int]) -> JobOutcome:
    """Runs this node's members until the leader says that the job is over.

    It is over as well when torchrun ends this start or dies. Raises StoreSilentError.
    """
    board, node, meeting = Board(place.store), place.own[0], place.meeting
    launcher = os.getppid()
    with naming_silent_store(meeting.host, meeting.answer_s):
        heart = _heart(agent, place)
    assert heart is not None  # there is a leader besides
    try:
        while not told and os.getppid() == launcher:
            with naming_silent_store(meeting.host, meeting.answer_s):
                agent.turn()
                if (code := board.heard(int, "over")) is not None:
                    board.say("", "left", node)
                    return JobOutcome(code)
            agent.wait(TURN_S)
    finally:
        heart.stop()
    with naming_silent_store(meeting.host, meeting.answer_s):
        board.heard(int, "over")  # torchrun may have seen first that the store is lost
    return JobOutcome(128 + told[0] if told else 1)


def _heart(agent: Agent, place: JobProcess) -> Heart | None:
    """Begins to beat for this process's node, where others listen.

    The leader ends with its lease itself, and frees the run's folder: when its machine has stood
    still for so long, torchrun begins another start of the job on the other machines.
    """
    if agent.lease is None:
        return None
    (node,) = place.own
    board = Board(place.meeting.connect(place.meeting.answer_s))
    return Heart(board, node, agent.lease, LeaseTimer() if place.leads else None)


def _alone(earlier: Earlier | None, cluster: Cluster, run: TrainingRun) -> JobProcess:
    draw_secret()
    store = loopback_store()
    return JobProcess(
        store=store,
        meeting=Meeting(host=store.host, port=store.port, answer_s=run.deadline_s),
        name=earlier.name if earlier else uuid.uuid4().hex,
        nodes=cluster.node_names,
        own=cluster.node_names,
        leads=True,
    )


def _under_torchrun(
    elastic: Elastic, earlier: Earlier | None, cluster: Cluster, run: TrainingRun
) -> JobProcess:
    """Meets the other agents that torchrun started, and returns this one's place among them.

    Raises InputError.
    """
    node, rank = elastic.node_name, int(os.environ["RANK"])
    names = ", ".join(cluster.node_names)
    if node is None:
        raise InputError(f"--node-name is missing: under torchrun it says which of {names} this is")
    if node not in cluster.node_names:
        raise InputError(f"--node-name is {node}; expected one of {names}")
    meeting = Meeting(
        host=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        answer_s=run.deadline_s,
    )
    world_size = int(os.environ["WORLD_SIZE"])
    come_s = max(run.deadline_s, COME_S)
    try:
        gathered = gather(launcher_store(run.deadline_s), rank, world_size, node, come_s)
    except GatheringError as error:
        raise InputError(str(error)) from None
    nodes = [agent.node for agent in gathered.agents]
    if len(set(nodes)) < len(nodes):
        raise InputError(
            f"the agents' --node-name are {', '.join(nodes)}; expected each of them once"
        )
    if unlike := unlike_terms(nodes, [agent.version for agent in gathered.agents]):
        raise InputError(unlike)
    if rank == 0:
        warn_of_unlike_torch(nodes, [agent.torch for agent in gathered.agents])
    meeting = replace(meeting, prefix=f"start {gathered.id}")
    store = meeting.connect(run.deadline_s)
    board = Board(store)
    if rank == 0:
        board.say(earlier.name if earlier else uuid.uuid4().hex, "name")
    return JobProcess(
        store=store,
        meeting=meeting,
        name=board.hear(str, "name"),
        nodes=nodes,
        own=[node],
        leads=rank == 0,
    )


def _torchrun() -> str | None:
    """The run id of the torchrun that started this process; None where none did."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if "RANK" in os.environ else None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields a list of the signals that have come; inside the block they have no other effect."""
    told: list[int] = []
    before = {number: signal.signal(number, lambda n, _: told.append(n)) for number in SIGNALS}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_plan(run: TrainingRun, cluster: Cluster, roster: Roster) -> tuple[str, ...]:
    """The members of the plan by rank: it is for the chips that are up, or for all of the cluster.

    Raises InputError where no chip is up, and PlanError.
    """
    if not roster.up():
        raise InputError(f"no chip of cluster {cluster.name} is available")
    there = cluster.kept(map(cluster.rank, roster.up()))
    if run.plan.members is None and run.plan.world_size == there.world_size:
        cluster = there
    cluster = used_cluster(run.plan, cluster)
    check_cluster(run.plan, cluster)
    if run.device == "chip":
        check_memory(run.plan, cluster, run.attention_within == "document")
    return cluster.members
