"""Trains one rank of a plan: the library behind heteropp-train."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from heteropp.description.files import FileError, write_text
from heteropp.models.spec import ModelError
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import StorePart
from heteropp.runtime import loop
from heteropp.runtime.measuring.events import keep_event
from heteropp.runtime.measuring.gauges import Expect
from heteropp.runtime.measuring.report import Reporter
from heteropp.runtime.measuring.trackers.tracking import TrackingError
from heteropp.runtime.ranks.agreement import check_agreement
from heteropp.runtime.ranks.attempt import attempt, launcher_store
from heteropp.runtime.ranks.device import open_device
from heteropp.runtime.ranks.heartbeats import POLL_S
from heteropp.runtime.ranks.store import StoreSilentError, limit_answers, naming_silent_store
from heteropp.runtime.ranks.transport import connect
from heteropp.runtime.ranks.watch import CAUSE_FILE, Watch, name_process
from heteropp.runtime.step.guard import DivergedError
from heteropp.runtime.trainer import Trainer
from heteropp.runtime.training_run import TrainingRun
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    find,
    steps,
)
from heteropp.state.checkpoint.writer import Writer, remove_partial, set_aside
from hyperhetero.progress import Status

FIRST_STEP = "first step"  # announced by rank 0: the completed steps that the job goes on from
SAVE_S = 7 * 24 * 3600.0  # a disk may be slow; the watch knows which rank is silent


def train_rank(run: TrainingRun, json_summary: bool = False, expect: Expect | None = None) -> int:
    """Trains as the rank that torchrun's environment names; ends the process on failure.

    expect: gives what each step is held against.

    Gives 0, or what a shell gives for SIGTERM when the run was told to stop, and saved.
    """
    # torchrun's ranks are not forked from a process that has them
    from heteropp.runtime.ranks import first_step_imports  # noqa: F401

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name_process(f"heteropp-{rank}")
    store = StorePart(f"attempt {attempt(run.deadline_s)}", launcher_store(run.deadline_s))
    # the watch comes first: it knows which rank is silent
    wait_s = run.deadline_s + 5 * POLL_S
    control = Control(store, rank, world_size, wait_s)
    trainer: Trainer | None = None
    reporter: Reporter | None = None
    starting = contextlib.ExitStack()  # shows that ranks start, until the reporter shows steps

    def doing() -> str:
        return trainer.doing() if trainer else "while starting"

    def on_exit() -> None:
        starting.close()
        if reporter:
            reporter.stop()

    labels = list(run.labels)
    if rank == 0:
        starting.enter_context(Status(f"starting {world_size} ranks"))
    try:
        with naming_silent_store(os.environ["MASTER_ADDR"], run.deadline_s):
            watch = Watch(store, control, labels, run.logs, run.deadline_s, doing, on_exit)
    except (dist.DistError, StoreSilentError, FileError) as error:
        starting.close()
        print(f"{labels[rank]} stopped while starting: {one_line(error)}", file=sys.stderr)
        return 1
    try:
        run.allow_code()
        chip = run.chips[rank]
        device = open_device(run.device, chip.file, chip.chip_type)
        check_agreement(run, control, watch.surroundings.name)
        connect(store, rank, world_size, device.backend, wait_s, run.p2p)
        trainer = Trainer(run, device, control, expect)
        if checkpoint := starting_point(run, control, attempt(run.deadline_s) > 0):
            trainer.restore(checkpoint)
        else:
            trainer.initialise()
        starting.close()
        if rank == 0:
            reporter = Reporter(
                run.output,
                trainer.completed,
                run.steps,
                json_summary,
                run.tracking,
                attempt(run.deadline_s),
            )
        own = Control(store.clone(), rank, world_size, SAVE_S)  # type: ignore[attr-defined]
        limit_answers(store, run.deadline_s)
        writer = Writer(
            run.checkpoints, own, run.keep, lambda what: watch.fail(f"stopped: {what}", True)
        )

        def before_step() -> None:
            if watch.told_to_stop:
                loop.stop_after_next_step(trainer)

        loop.train(trainer, reporter, writer, before_step)
        stopped = trainer.completed < run.steps
        writer.finish()
        if not stopped:
            loop.finish(trainer, reporter, json_summary)
        elif reporter:
            reporter.stopped(trainer.completed)
        control.barrier("finish")
        watch.finish()
        dist.destroy_process_group()
        control.leave()
        if watch.told_to_stop:
            _end_without_launcher()
        return 128 + signal.SIGTERM if stopped else 0
    except torch.OutOfMemoryError as error:
        watch.fail(f"ran out of memory: {one_line(error)}", is_own=True)
    except (FileError, ModelError, CheckpointError, DivergedError, TrackingError) as error:
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
        keep_event(run.output, "restart", step, f"all ranks started again{why}")
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


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def keep_traceback(path: Path) -> None:
    with contextlib.suppress(FileError):
        write_text(path, traceback.format_exc())
