"""Trains one rank of a plan: the library behind heteropp-train."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from heteropp.data.sequences import Sequences
from heteropp.data.source import open_tokens
from heteropp.data.token_file import TokenFile
from heteropp.data.whole_documents import WholeDocuments
from heteropp.description.files import FileError, write_text
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.description.timeline import Span
from heteropp.models.llama.hugging_face_weights import load_weights
from heteropp.process_groups.control import Control
from heteropp.runtime.executor import Executor, StepResult
from heteropp.runtime.loop import advance, finish
from heteropp.runtime.measuring.gauges import Gauges
from heteropp.runtime.measuring.report import Reporter
from heteropp.runtime.mixed_lengths.batches import MixedBatches
from heteropp.runtime.mixed_lengths.plans import what_is_learnt
from heteropp.runtime.mixed_lengths.step import MixedLengths
from heteropp.runtime.ranks.attempt import attempt, launcher_store
from heteropp.runtime.ranks.device import Device, open_device, set_links
from heteropp.runtime.ranks.heartbeats import POLL_S
from heteropp.runtime.ranks.store import limit_answers
from heteropp.runtime.ranks.transport import P2P, Coordinates, Groups, connect
from heteropp.runtime.ranks.watch import CAUSE_FILE, Watch, name_process
from heteropp.runtime.stage_modules import stage_modules
from heteropp.runtime.step.batches import Batches, check_same_data
from heteropp.runtime.step.guard import DivergedError
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    Manifest,
    check_resumable,
    find,
    steps,
)
from heteropp.state.checkpoint.reader import Reader
from heteropp.state.checkpoint.writer import Writer, remove_partial, set_aside
from heteropp.state.slices import State
from heteropp.state.switching.buffers import Buffers, fill
from heteropp.state.switching.switch import Position

FIRST_STEP = "first step"  # announced by rank 0: the completed steps that the job goes on from
LAST_STEP = "last step"  # announced by rank 0 when the job is told to stop
SAVE_S = 7 * 24 * 3600.0  # a disk may be slow; the watch knows which rank is silent
TRACED_STEPS = 64  # a trace shows the median of the newest


@dataclass(frozen=True)
class RankChip:
    """The chip a rank runs on."""

    file: str  # a chip file's name or path
    chip_type: str


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What to train, and where to."""

    plan: Plan
    cluster: Path | None  # None only without chips
    chips: tuple[RankChip, ...]  # by rank
    steps: int  # in all, those before a resume included
    output: Path
    data: Path | None  # None: the Python standard library's sources
    validation: Path | None = None  # another token file, or folder of text
    validate_every: int = 0  # steps; 0: only at the end
    weights: Path | None  # a Hugging Face folder to start from; None: initial values of the seed
    resume: bool
    resume_from: int | None  # step; None: the newest checkpoint
    checkpoint_every: int  # steps; 0: only at the end
    keep: int  # checkpoints
    deadline_s: float  # of every wait for another rank
    seed: int
    hyperparameters: Hyperparameters
    device: Literal["chip", "cpu"]
    p2p: P2P | None = None  # None: as DICOMM_STRATEGY says
    tensorboard: bool = False
    by_length: tuple[Plan, ...] = ()  # of a run of mixed lengths; `plan` is the first
    documents: int = 0  # of a step of such a run

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the ranks in messages, such as "rank 3 (chip B)"."""
        return tuple(f"rank {i} (chip {chip.chip_type})" for i, chip in enumerate(self.chips))

    def validates(self, step: int) -> bool:
        """Whether the validation loss is wanted after this many steps."""
        if self.validation is None:
            return False
        return step == self.steps or bool(self.validate_every and step % self.validate_every == 0)

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.output / "logs"


opened = cache(open_tokens)  # once a process: its later plans train on the same tokens


class Trainer:
    """One rank's share of a run; it begins with `initialise`, `restore` or `take_over`."""

    def __init__(self, run: TrainingRun, device: Device, control: Control) -> None:
        self.run, self.device, self.control = run, device, control
        plan = run.plan
        self.place = Coordinates.of(plan, control.rank)
        self.groups = Groups(self.place)
        if run.cluster is not None:
            set_links(run.cluster, self.groups)
        self.modules = stage_modules(plan, self.place, self.groups, device.device, run.seed)
        self.executor = self._executor()
        self.tokens = opened(run.data)
        self.batches = self._batches(self.tokens, "data", run.seed)
        self.validation: Batches | MixedBatches | None = None
        if run.validation is not None:
            self.validation = self._batches(opened(run.validation), "validation")
        self.state = State(self.executor.update, self.executor.guard)
        one_plan = not run.by_length
        self.gauges = Gauges(plan, run.cluster, control.rank, run.labels, device, one_plan)
        self.completed = 0
        self.ended_s = time.time()  # when the newest step did, by the time of day
        self.batch: Any = None  # what the executor takes, of the next step, once made
        # (step, its seconds, when its actions ran)
        self.spans: deque[tuple[int, float, list[Span]]] = deque(maxlen=TRACED_STEPS)

    def _executor(self) -> Executor | MixedLengths:
        run, settings = self.run, (self.run.hyperparameters, self.device.clock)
        if not run.by_length:
            return Executor(run.plan, self.place, self.groups, self.modules, *settings)
        groups, modules = [self.groups], [self.modules]
        for plan in run.by_length[1:]:
            place = Coordinates.of(plan, self.place.rank)
            groups[-1].make_up(place.rank)
            groups.append(Groups(place))
            if run.cluster is not None:
                set_links(run.cluster, groups[-1])
            modules.append(stage_modules(plan, place, groups[-1], self.device.device, run.seed))
        return MixedLengths(run.by_length, self.place.rank, groups, modules, *settings)

    def _batches(
        self, tokens: TokenFile, what: str, seed: int | None = None
    ) -> Batches | MixedBatches:
        run, device = self.run, self.device.device
        check_same_data(self.control, what, tokens)
        if run.by_length:
            documents = WholeDocuments(tokens, run.by_length[-1].model, seed)
            rank = self.place.rank
            return MixedBatches(documents, run.documents, run.by_length, rank, device)
        return Batches(Sequences(tokens, run.plan.model, seed), run.plan, self.place, device)

    def doing(self) -> str:
        """Says what this rank is doing, for the line that it prints as it ends."""
        action = self.executor.current
        if action is None:
            return f"between steps {self.completed} and {self.completed + 1}"
        where = f" of micro-batch {action.micro_batch}" if action.micro_batch is not None else ""
        return f"in {action.kind}{where}, step {self.completed + 1}"

    def step(self) -> tuple[StepResult, float]:
        """Trains one step; returns its result and the seconds that it took on this rank."""
        self.device.begin_step()
        start_s = time.monotonic()
        learning_rate = self.run.hyperparameters.learning_rate_at(self.completed)
        batch = self.batch or self._batch(self.completed)
        self.executor.submit(learning_rate, batch)
        if self.completed + 1 < self.run.steps:
            self.batch = self._batch(self.completed + 1)  # while the device is busy
        result = self.executor.finish()
        step_s, self.ended_s = time.monotonic() - start_s, time.time()
        self.reading = self.gauges.read(result)
        self.completed += 1
        self.device.end_step()
        self.spans.append((self.completed, step_s, self.gauges.spans(result)))
        return result, step_s

    def validate(self) -> float | None:
        """Returns the mean loss over all validation data, or None where it is not due."""
        if self.validation is None or not self.run.validates(self.completed):
            return None
        total, counted = 0.0, 0
        for first in range(0, self.validation.sequences.count, self.validation.global_batch):
            batch: Any = self.validation.at(first)
            total += self.executor.evaluate(batch) * batch.counted
            counted += batch.counted
        return total / counted

    def _batch(self, step: int) -> Any:
        return self.batches.at(step * self.batches.global_batch)

    def manifest(self) -> Manifest:
        return Manifest(
            step=self.completed,
            **what_is_learnt(self.run.plan, self.run.by_length, self.run.documents),
            seed=self.run.seed,
            tokens_sha256=self.tokens.sha256,
            hyperparameters=self.run.hyperparameters,
            scalars=self.state.scalars(),
        )

    def save(self, writer: Writer) -> None:
        """Saves a checkpoint; every rank must call it."""
        writer.save(self.manifest(), self.state.slices())

    def initialise(self) -> None:
        """Begins at step 0. Raises FileError where the weights to start from are bad."""
        for flat in self.executor.update.each():
            if self.run.weights is None:
                flat.module.initialise(self.run.seed)
            else:
                load_weights(self.run.weights, flat.module)
            flat.take_values()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, of whichever plan. Raises CheckpointError."""
        check_resumable(checkpoint, self.manifest())
        self.state.restore(Reader(checkpoint), checkpoint.manifest.scalars)
        self.completed = checkpoint.manifest.step

    def position(self) -> Position:
        return Position(self.completed, self.state.scalars(), self.ended_s)

    def take_over(self, position: Position, buffers: Buffers) -> None:
        """Goes on from another plan's state, which was moved to buffers of this plan and rank."""
        fill(self.executor.update, buffers)
        self.state.take(position.scalars)
        self.completed = position.step


def train_rank(run: TrainingRun, json_summary: bool = False) -> int:
    """Trains as the rank that torchrun's environment names; ends the process on failure.

    Gives 0, or what a shell gives for SIGTERM when the run was told to stop, and saved.
    """
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name_process(f"heteropp-{rank}")
    store = dist.PrefixStore(f"attempt {attempt()}", launcher_store())
    limit_answers(store, run.deadline_s)
    # the watch comes first: it knows which rank is silent
    wait_s = run.deadline_s + 5 * POLL_S
    control = Control(store, rank, world_size, wait_s)
    trainer: Trainer | None = None
    reporter: Reporter | None = None

    def doing() -> str:
        return trainer.doing() if trainer else "while starting"

    def on_exit() -> None:
        if reporter:
            reporter.stop()

    labels = list(run.labels)
    try:
        watch = Watch(store, control, labels, run.logs, run.deadline_s, doing, on_exit)
    except dist.DistError as error:
        print(f"{labels[rank]} stopped while starting: {one_line(error)}", file=sys.stderr)
        return 1
    try:
        chip = run.chips[rank]
        device = open_device(run.device, chip.file, chip.chip_type)
        connect(store, rank, world_size, device.backend, wait_s, run.p2p)
        trainer = Trainer(run, device, control)
        if checkpoint := starting_point(run, control, attempt() > 0):
            trainer.restore(checkpoint)
        else:
            trainer.initialise()
        if rank == 0:
            reporter = Reporter(
                run.output, trainer.completed, run.steps, json_summary, run.tensorboard
            )
        own = Control(store.clone(), rank, world_size, SAVE_S)  # type: ignore[attr-defined]
        limit_answers(store, run.deadline_s)
        writer = Writer(
            run.checkpoints, own, run.keep, lambda what: watch.fail(f"stopped: {what}", True)
        )
        stopped = _loop(trainer, reporter, writer, watch)
        writer.finish()
        if not stopped:
            finish(trainer, reporter, json_summary)
        elif reporter:
            reporter.stopped(trainer.completed)
        control.barrier("finish")
        watch.finish()
        dist.destroy_process_group()
        if watch.told_to_stop:
            _end_without_launcher()
        return 128 + signal.SIGTERM if stopped else 0
    except torch.OutOfMemoryError as error:
        watch.fail(f"ran out of memory: {one_line(error)}", is_own=True)
    except (FileError, CheckpointError, DivergedError) as error:
        watch.fail(f"stopped: {one_line(error)}", is_own=True)
    except Exception as error:
        # the line that the watch prints has room for the error alone
        keep_traceback(run.logs / f"rank-{rank}.traceback")
        watch.fail(f"failed: {type(error).__name__}: {one_line(error)}")
    raise AssertionError("watch.fail ends the process")


def starting_point(run: TrainingRun, control: Control, restarted: bool) -> Checkpoint | None:
    """The checkpoint to go on from, if any; rank 0 decides. Raises FileError or CheckpointError."""
    if control.rank:
        step = int(control.hear(FIRST_STEP))
        return find(run.checkpoints, step) if step else None
    remove_partial(run.checkpoints)
    found: Checkpoint | None = None
    if restarted:
        found = find(run.checkpoints)
    elif run.resume:
        found = find(run.checkpoints, run.resume_from)
        if found is None:
            raise CheckpointError(f"{run.checkpoints} holds no checkpoint to resume from")
    elif steps(run.checkpoints):
        raise CheckpointError(f"{run.checkpoints} holds checkpoints of an earlier run")
    step = found.manifest.step if found else 0
    set_aside(run.checkpoints, step)
    if restarted:
        cause = run.logs / CAUSE_FILE
        why = f" after this: {cause.read_text()}" if cause.exists() else ""
        print(f"starting again from step {step}{why}", file=sys.stderr, flush=True)
    control.announce(FIRST_STEP, str(step))
    return found


def _end_without_launcher() -> None:
    """Ends this process soon, with exit code 0.

    A launcher that was itself told to stop does not take what a rank returns, for which the rank
    would wait.
    """
    sys.stdout.flush()
    timer = threading.Timer(1, os._exit, [0])
    timer.daemon = True
    timer.start()


def _loop(trainer: Trainer, reporter: Reporter | None, writer: Writer, watch: Watch) -> bool:
    """Trains and saves; gives whether it was told to stop before the last step."""
    run, control = trainer.run, trainer.control
    while trainer.completed < run.steps:
        if watch.told_to_stop and control.rank == 0 and not control.announced(LAST_STEP):
            control.announce(LAST_STEP, str(trainer.completed + 1))
        advance(trainer, reporter)
        # no rank ends a step before rank 0 has given its part of the norm to it, so that at the end
        # of a step all of them know what rank 0 announced before it
        last_step = min(run.steps, int(control.announced(LAST_STEP) or run.steps))
        last = trainer.completed == last_step
        if last or (run.checkpoint_every and trainer.completed % run.checkpoint_every == 0):
            trainer.save(writer)
        if last:
            break
    return trainer.completed < run.steps


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def keep_traceback(path: Path) -> None:
    with contextlib.suppress(FileError):
        write_text(path, traceback.format_exc())
