"""One member's part in one generation: it takes its state, trains, saves and keeps snapshots."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from heteropp.elastic.job import Board, Generation, Job, generation_store
from heteropp.elastic.member.links import ClusterLinks
from heteropp.elastic.member.preparation import Preparation
from heteropp.elastic.member.snapshots import make_snapshot_writer, recovered
from heteropp.elastic.messages import Account, Progress
from heteropp.process_groups.control import Control
from heteropp.runtime import loop
from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.report import Reporter, as_json
from heteropp.runtime.ranks.device import Device
from heteropp.runtime.train import SAVE_S, starting_point
from heteropp.runtime.trainer import Trainer
from heteropp.simulator.expectation import expected_step
from heteropp.state.checkpoint.writer import Writer, remove_partial, set_aside
from heteropp.state.recovery.sources import LostError
from heteropp.state.slices.buffers import Buffers, of_training
from heteropp.state.switching.switch import Position
from heteropp.state.switching.table import Table

Say = Callable[[str], None]


@dataclass(frozen=True)
class Arrived:
    """What a switch gives a member of the new plan."""

    position: Position
    buffers: Buffers
    account: Account  # but for the seconds


@dataclass(frozen=True)
class Left:
    """What a member has when it is to switch."""

    position: Position
    buffers: Buffers
    tables: dict[int, Table]  # that were prepared, by number of the generation that follows
    finish: Callable[[], None]  # waits until what was kept is kept, for a while


class Session:
    def __init__(
        self,
        job: Job,
        generation: Generation,
        control: Control,
        device: Device,
        links: ClusterLinks | None,
        arrived: Arrived | None,
        fail: Say,
    ) -> None:
        """Takes the state, in the process group of the generation's members.

        arrived: the state that a switch brought; None: it is read or made. `fail` ends the process
        with a sentence; any thread may call it.
        """
        begin_s = time.monotonic()
        self.job, self.generation, self.control = job, generation, control
        self.board = Board(job.meeting.connect(job.run.deadline_s))
        self.run = job.run_of(generation)
        self.trainer = Trainer(self.run, device, control, expected_step)
        account = self._begin(arrived, begin_s)
        self.reporter: Reporter | None = None
        if control.rank == 0:
            how = "switched" if arrived else "recovered"
            self.board.say(account, how, generation.number)
            completed, steps = self.trainer.completed, self.run.steps
            tracking, restarts = self.run.tracking, generation.number - 1
            self.reporter = Reporter(self.run.output, completed, steps, False, tracking, restarts)
        self.writer = Writer(self.run.checkpoints, self._own_control(), self.run.keep, fail)
        self.snapshot_writer = make_snapshot_writer(
            job, generation, self.trainer, self._own_control(), self._warn
        )
        if arrived:  # who left may have held the only snapshots
            self.snapshot_writer.keep(self.trainer.manifest(), first=True)
        self.preparation = Preparation(job, generation, links)
        self.follower: Generation | None = None  # once this generation has trained its last step

    def train(self) -> Generation | None:
        """Trains until the job ends or another generation is to follow, which it returns."""
        trainer = self.trainer
        loop.train(trainer, self.reporter, self.writer, self._announce, self._after_step)
        if self.follower is not None:
            return self.follower
        if self.generation.start == "recover" and not trainer.spans:
            trainer.save(self.writer)  # of the last step, whose checkpoint may not be whole
        self._end()
        return None

    def leave(self) -> Left:
        """Ends the training under this plan, but for its state."""
        position = self.trainer.position()
        self.writer.finish()
        tables = self.preparation.finish()
        if self.reporter:
            self.reporter.close()
        buffers = of_training(self.trainer.executor.update)
        self.snapshot_writer.release()
        finish = partial(self.snapshot_writer.finish, self.run.deadline_s)
        del self.trainer
        gc.collect()  # gradients and all else: what comes next needs the room
        self.control.barrier("left")  # nobody waits for a message any more
        return Left(position, buffers, tables, finish)

    def doing(self) -> str:
        return self.trainer.doing() if hasattr(self, "trainer") else "in a switch"

    def _begin(self, arrived: Arrived | None, begin_s: float) -> Account:
        """Takes the state from wherever it comes."""
        trainer = self.trainer
        if arrived is not None:
            trainer.take_over(arrived.position, arrived.buffers)
            stood_s = time.time() - arrived.position.ended_s
            return replace(arrived.account, seconds=max(0.0, stood_s))
        found = self._recovered() if self.generation.start == "recover" else None
        if isinstance(found, Account):
            return found
        again = self.generation.start == "recover" or self.generation.number > 1
        if checkpoint := starting_point(self.run, self.control, again):
            trainer.restore(checkpoint)
        elif found:
            raise LostError(f"{found}; and there is no checkpoint", found.nodes)
        else:
            trainer.initialise()
        return Account(step=trainer.completed, seconds=time.monotonic() - begin_s)

    def _recovered(self) -> Account | LostError | None:
        """Takes the state from the newest snapshots.

        Returns the LostError that says what is missing where no step is whole, and None where
        there is no snapshot or a checkpoint is newer.
        """
        if self.control.rank == 0:
            self.board.say("", "reading", self.generation.number)
        try:
            account = recovered(self.job, self.generation, self.trainer, self._warn)
        except LostError as error:
            return error
        if account and self.control.rank == 0:
            remove_partial(self.run.checkpoints)
            set_aside(self.run.checkpoints, account.step)
        return account

    def _announce(self) -> None:
        """Announces, on rank 0, when the step about to begin is the last one under this plan."""
        number, step = self.generation.number, self.trainer.completed + 1
        if step == self.run.steps or self.board.heard(int, "switch-at", number) is not None:
            return
        if self.board.heard(str, "stop") is not None:
            loop.stop_after_next_step(self.trainer)
        elif self.board.heard(int, "next", number) is not None:
            self.board.say(step, "switch-at", number)

    def _after_step(self, metrics: StepMetrics | None) -> bool:
        """Keeps snapshots and reports progress; returns whether another generation follows now."""
        self.snapshot_writer.keep(self.trainer.manifest())
        if metrics:
            self._tell(metrics)
        if self.trainer.completed == self.board.heard(int, "switch-at", self.generation.number):
            number = self.board.hear(int, "next", self.generation.number)
            self.follower = self.board.hear(Generation, "generation", number)
        return self.follower is not None

    def _tell(self, metrics: StepMetrics) -> None:
        progress = Progress(
            step=metrics.step,
            loss=metrics.loss if math.isfinite(metrics.loss) else None,
            tokens_per_s=metrics.tokens_per_s,
            step_s=metrics.step_s,
        )
        self.board.say(progress, "progress", self.generation.number)

    def _end(self) -> None:
        """Ends the training: reports its summary after the last step, or else where it stopped."""
        self.preparation.finish()
        self.writer.finish()
        if self.trainer.completed < self.run.steps:
            if self.reporter:
                self.reporter.stopped(self.trainer.completed)
        elif summary := loop.finish(self.trainer, self.reporter):
            self.board.say(as_json(summary), "summary")
        self.snapshot_writer.finish(self.run.deadline_s)
        self.control.barrier("finish")

    def _own_control(self) -> Control:
        """Returns a control for a thread, with a longer limit, as threads may wait for disks."""
        store = generation_store(self.job.meeting.connect(SAVE_S), self.generation.number)
        return Control(store, self.control.rank, self.control.world_size, SAVE_S)

    def _warn(self, what: str) -> None:
        print(f"warning: {what}", flush=True)
