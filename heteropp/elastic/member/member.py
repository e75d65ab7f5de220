"""One member of an elastic job: a process that has one chip, through its generations."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist

from heteropp.description.files import FileError
from heteropp.elastic.job import Board, Generation, Job, generation_store, switch_store
from heteropp.elastic.member.links import ClusterLinks
from heteropp.elastic.member.preparation import switch_between, table_of
from heteropp.elastic.member.session import Arrived, Left, Session
from heteropp.elastic.messages import Account, Failure, FailureKind, MovedState
from heteropp.models.spec import ModelError
from heteropp.process_groups.control import Control
from heteropp.runtime.measuring.trackers.tracking import TrackingError
from heteropp.runtime.ranks.device import open_device
from heteropp.runtime.ranks.heartbeats import POLL_S
from heteropp.runtime.ranks.transport import connect
from heteropp.runtime.ranks.watch import Watch
from heteropp.runtime.step.guard import DivergedError
from heteropp.runtime.train import keep_traceback, one_line
from heteropp.runtime.trainer import opened
from heteropp.simulator.expectation import expected_step
from heteropp.state.checkpoint.manifest import CheckpointError
from heteropp.state.recovery.sources import LostError
from heteropp.state.slices.buffers import to_host
from heteropp.state.slices.holdings import state_bytes
from heteropp.state.switching.switch import Switch, move
from heteropp.state.switching.table import Table

CALL_POLL_S = 0.1  # a joiner's, of the word to switch
ROOM = 2.5  # times the new state, that is on a chip twice for a moment, and its gradients


def run_member(job: Job, name: str, number: int) -> int:
    """Trains as a member, from the generation that it is started for; gives the exit code."""
    torch.set_num_threads(1)
    return Member(job, name, number).run()


class Member:
    def __init__(self, job: Job, name: str, started_for: int) -> None:
        """started_for: number of the generation that this process is started for."""
        self.job, self.name, self.started_for = job, name, started_for
        self.wait_s = job.run.deadline_s + 5 * POLL_S  # the watch knows sooner who is silent
        self.store = job.meeting.connect(self.wait_s)
        self.board = Board(self.store)
        self.watch: Watch | None = None
        self.session: Session | None = None

    def run(self) -> int:
        """Trains; returns 0 when training ends or goes on without this member.

        Any error ends the process with exit code 1, after the leader and the log are told.
        """
        try:
            self.job.run.allow_code()
            self._live(self.board.hear(Generation, "generation", self.started_for))
            return 0
        except torch.OutOfMemoryError as error:
            self._fail("job", f"ran out of memory: {one_line(error)}")
        except LostError as error:
            self._fail("lost", f"stopped: {one_line(error)}", error.nodes)
        except (FileError, ModelError, CheckpointError, DivergedError, TrackingError) as error:
            self._fail("job", f"stopped: {one_line(error)}")
        except torch.AcceleratorError as error:
            self._fail("chip", f"failed: {one_line(error)}")
        except Exception as error:
            keep_traceback(self.job.run.logs / f"{self.name.replace('/', '-')}.traceback")
            self._fail("other", f"failed: {type(error).__name__}: {one_line(error)}")

    def _live(self, generation: Generation) -> None:
        rank = generation.members.index(self.name)
        chip = self.job.run_of(generation).chips[rank]
        self.device = open_device(self.job.run.device, chip.file, chip.chip_type)
        self.links: ClusterLinks | None = None
        if self.device.backend == "dicomm" and self.job.run.cluster is not None:
            self.links = ClusterLinks(self.job.run.cluster)
        gc.collect()
        gc.freeze()  # what is imported by now lives on: later collections are for the trainings'
        arrived = self._join(generation) if generation.start == "switch" else None
        while True:
            session = self._begin(generation, arrived)
            arrived = None  # the chip's room for it is the training's by now
            follower = session.train()
            if follower is None:
                break
            left = session.leave()
            arrived = self._switch(generation, follower, left)
            if arrived is None:
                left.finish()
                break
            generation = follower
            del session, left  # and with them the old state
        self._leave_world()
        assert self.watch is not None
        self.watch.finish()

    def _begin(self, generation: Generation, arrived: Arrived | None) -> Session:
        self.session = None
        store = generation_store(self.store, generation.number)
        control = self._enter_world(store, generation.members)

        def fail(what: str) -> None:
            self._fail("job", f"stopped: {what}")

        self.session = Session(
            self.job, generation, control, self.device, self.links, arrived, fail
        )
        return self.session

    def _join(self, generation: Generation) -> Arrived:
        """Lets a new member take part in the switch to its generation, and returns its state.

        It waits until the generation before has set its last step.
        """
        assert generation.before is not None
        before = self.board.hear(Generation, "generation", generation.before)
        opened(self.job.run.data)
        _predict(self.job, generation)
        self.board.say("", "ready", generation.number, self.name)
        noticed = False  # until the switch no watch listens for a notice
        while self.board.heard(int, "switch-at", before.number) is None:
            if not noticed and signal.SIGTERM in signal.sigpending():
                self.board.say("", "notice", self.started_for, self.name)
                noticed = True
            time.sleep(CALL_POLL_S)
        arrived = self._switch(before, generation, None)
        assert arrived is not None
        return arrived

    def _switch(self, old: Generation, new: Generation, left: Left | None) -> Arrived | None:
        """Moves the state, in a world of both generations' members; None: this member leaves."""
        switch = switch_between(old, new)
        control = self._enter_world(switch_store(self.store, new.number), switch.members)
        if self.links:
            self.links.pace(switch.members)
        table = left.tables.get(new.number) if left else None
        table = table or table_of(switch, self.links)
        on_chip = self.name in new.members and self._has_room(switch)
        if left and not on_chip:
            to_host(left.buffers)
        position, buffers = move(
            switch,
            table,
            control,
            (left.position, left.buffers) if left else None,
            self.device.device if on_chip else torch.device("cpu"),
        )
        if buffers is None:
            return None
        if left:  # by this machine's clock
            position = replace(position, ended_s=left.position.ended_s)
        return Arrived(position, buffers, _account(position.step, table, switch.members))

    def _enter_world(self, store: dist.Store, members: Sequence[str]) -> Control:
        """Leaves the world that this member is in, if any; from now on these watch each other."""
        self._leave_world()
        control = Control(store, members.index(self.name), len(members), self.wait_s)
        before, self.watch = self.watch, self._watch(store, control, members)
        if before is not None:
            before.finish()
        run = self.job.run
        connect(store, control.rank, len(members), self.device.backend, self.wait_s, run.p2p)
        return control

    def _leave_world(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self, store: dist.Store, control: Control, members: Sequence[str]) -> Watch:
        notices = Board(self.job.meeting.connect(self.wait_s))  # of the watch's thread
        run = self.job.run
        return Watch(
            store,
            control,
            list(members),
            run.logs,
            run.deadline_s,
            lambda: self.session.doing() if self.session else "while starting",
            lambda: None,
            lambda: notices.say("", "notice", self.started_for, self.name),
        )

    def _has_room(self, switch: Switch) -> bool:
        """Whether the chip holds the old state, the new one and what comes with it."""
        if self.device.device.type == "cpu":
            return True
        free_bytes, _ = torch.accelerator.get_memory_info()
        spare_bytes = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
        rank = switch.new_members.index(self.name)
        return free_bytes + spare_bytes > ROOM * state_bytes(switch.new, rank)

    def _fail(self, kind: FailureKind, what: str, nodes: tuple[str, ...] = ()) -> NoReturn:
        def tell() -> None:
            self.board.say(
                Failure(kind=kind, what=what, nodes=nodes), "failed", self.started_for, self.name
            )

        if self.watch is not None:  # an error of another kind may be another member's death
            self.watch.fail(what, kind != "other", tell)
        with suppress(Exception):  # the store may be what failed
            tell()
        print(f"{self.name} {what}", file=sys.stderr, flush=True)
        os._exit(1)


def _predict(job: Job, generation: Generation) -> None:
    """Simulates the generation's step while a joiner waits: the training compares its own with it.

    It must not run beside a training step: tracing puts torch in modes of the whole process, in
    which the step would compute something else.
    """
    run = job.run_of(generation)
    if run.cluster is not None:
        expected_step(run.plan, run.cluster)


def _account(step: int, table: Table, members: Sequence[str]) -> Account:
    """What moved, but for the time that it took."""
    stayed = (
        MovedState(to=members[place], source="memory", origin=members[place], bytes=size_bytes)
        for place, size_bytes in sorted(table.stayed_bytes.items())
    )
    came = (
        MovedState(to=members[receiver], source="peer", origin=members[sender], bytes=size_bytes)
        for (sender, receiver), size_bytes in sorted(table.volume_bytes.items())
    )
    return Account(step=step, moved=(*stayed, *came), seconds=0)
