"""Trains one rank of a plan: the library behind heteropp-train."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from heteropp.files import FileError, write_text
from heteropp.hyperparameters import Hyperparameters
from heteropp.plan import Plan
from heteropp.reshard import replica_box
from heteropp.timeline import Span
from heteropp.training import checkpoint
from heteropp.training.checkpoint import CheckpointError, Manifest
from heteropp.training.control import Control
from heteropp.training.data import DataError, open_tokens
from heteropp.training.device import Device, open_device, set_links
from heteropp.training.executor import Executor, StepResult
from heteropp.training.llama import StageModule
from heteropp.training.metrics import StepMetrics
from heteropp.training.report import Reporter, as_json
from heteropp.training.transport import Groups, Place, connect
from heteropp.training.watch import Watch

TRACED_STEPS = 64  # a trace shows the median of the newest


@dataclass(frozen=True)
class RankChip:
    """The chip a rank runs on."""

    file: str  # a chip file's name or path
    chip_type: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to train, and where to."""

    plan: Plan
    cluster: Path | None  # None only without chips
    chips: tuple[RankChip, ...]  # by rank
    steps: int  # in all, those before a resume included
    output: Path
    data: Path | None  # None: the Python standard library's sources
    resume: bool
    checkpoint_every: int  # steps; 0: only at the end
    keep: int  # checkpoints
    seed: int
    hyperparameters: Hyperparameters
    device: Literal["chip", "cpu"]

    @property
    def labels(self) -> tuple[str, ...]:
        """What ranks are called, "rank 3 (chip B)"."""
        return tuple(f"rank {i} (chip {chip.chip_type})" for i, chip in enumerate(self.chips))

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.output / "logs"


# tokens and targets of a step, [micro-batches, rows] each
Batch = tuple[Tensor | None, Tensor | None]


class Trainer:
    """One rank's share of a run."""

    def __init__(self, run: Run, device: Device, control: Control) -> None:
        self.run, self.device, self.control = run, device, control
        plan = run.plan
        self.place = Place.of(plan, control.rank)
        self.groups = Groups(self.place)
        if run.cluster is not None:
            set_links(run.cluster, self.groups)
        dtype = getattr(torch, plan.model.dtype)
        module = StageModule(
            plan.model,
            self.place.stage.layers,
            self.groups.tensor_parallel,
            device.device,
            dtype,
        )
        module.initialise(run.seed)
        self.module = module
        self.executor = Executor(
            plan, self.place, self.groups, module, run.hyperparameters, device.clock
        )
        self.tokens = open_tokens(run.data)
        self.completed = 0
        self.batch: Batch | None = None  # of the next step, once made
        # (step, its seconds, when its actions ran on this machine's monotonic clock)
        self.spans: deque[tuple[int, float, list[Span]]] = deque(maxlen=TRACED_STEPS)

    def doing(self) -> str:
        """What this rank is at, for the line it ends with."""
        action = self.executor.current
        if action is None:
            return f"between steps {self.completed} and {self.completed + 1}"
        where = f" of micro-batch {action.micro_batch}" if action.micro_batch is not None else ""
        return f"in {action.kind}{where}, step {self.completed + 1}"

    def step(self) -> tuple[StepResult, float]:
        """One step; gives its result and how long it took here, in seconds."""
        self.device.begin_step()
        start_s = time.monotonic()
        learning_rate = self.run.hyperparameters.learning_rate_at(self.completed)
        batch = self.batch or self._batch(self.completed)
        self.executor.submit(learning_rate, *batch)
        if self.completed + 1 < self.run.steps:
            self.batch = self._batch(self.completed + 1)  # while the device is busy
        result = self.executor.finish()
        step_s = time.monotonic() - start_s
        seconds = self.device.clock.seconds
        self.completed += 1
        self.device.end_step()
        spans = [
            Span(self.place.rank, action.kind, action.micro_batch, seconds(begin), seconds(end))
            for action, begin, end in result.marks
        ]
        self.spans.append((self.completed, step_s, spans))
        return result, step_s

    def _batch(self, step: int) -> Batch:
        """Tokens and targets of this replica, [micro-batches, rows], where the stage needs them."""
        plan, place = self.run.plan, self.place
        if place.previous and place.following:
            return None, None
        length = plan.model.sequence_length
        ((first, last),) = replica_box(place.stage, place.replica_index, length).ranges
        indices = [
            micro_batch * plan.micro_batch + sequence
            for micro_batch in range(plan.pipelines[0].micro_batches)
            for sequence in range(first // length, last // length)
        ]
        sequences = self.tokens.sequences(self.run.seed, step, indices, length)
        micro_batches = plan.pipelines[0].micro_batches

        def to_device(part: np.ndarray) -> Tensor:
            return torch.from_numpy(part.reshape(micro_batches, -1).copy()).to(self.device.device)

        return (
            None if place.previous else to_device(sequences[:, :-1]),
            None if place.following else to_device(sequences[:, 1:]),
        )

    def manifest(self) -> Manifest:
        return Manifest(
            step=self.completed,
            plan_sha256=checkpoint.plan_sha256(self.run.plan),
            seed=self.run.seed,
            tokens_sha256=self.tokens.sha256,
            hyperparameters=self.run.hyperparameters,
        )

    def save(self) -> None:
        tensors = self._optimizer_state()
        if self.place.replica_index == 0:  # the others' parameters are equal
            tensors.update(self.module.named_parameters())
        checkpoint.save(self.run.checkpoints, self.manifest(), tensors, self.control, self.run.keep)

    def restore(self) -> None:
        """Goes back to the newest checkpoint. Raises FileError or CheckpointError."""
        found = checkpoint.latest(self.run.checkpoints)
        if found is None:
            raise checkpoint.CheckpointError(f"{self.run.checkpoints} holds no checkpoint")
        path, manifest = found
        checkpoint.check_resumable(path, manifest, self.manifest())
        own = checkpoint.load(path, manifest, self.place.rank)
        first = self.place.stage.replicas[0].ranks[self.place.tp_index]
        shared = own if first == self.place.rank else checkpoint.load(path, manifest, first)
        for name, parameter in self.module.named_parameters():
            checkpoint.fill(parameter, shared, name, path / checkpoint.rank_file(first))
        for name, tensor in self._optimizer_state().items():
            checkpoint.fill(tensor, own, name, path / checkpoint.rank_file(self.place.rank))
        self.completed = manifest.step

    def _optimizer_state(self) -> dict[str, Tensor]:
        flat = self.executor.flat
        state = {
            "optimizer.average": flat.optimizer.average,
            "optimizer.average_square": flat.optimizer.average_square,
            "optimizer.steps": flat.optimizer.steps,
        }
        if flat.mixed:
            state["optimizer.master"] = flat.master
        return state


def train_rank(run: Run, json_summary: bool = False) -> None:
    """Trains as the rank that torchrun's environment names; ends the process on failure."""
    torch.set_num_threads(1)
    store, rank, world_size = next(rendezvous("env://"))
    control = Control(store, rank, world_size)
    trainer: Trainer | None = None
    reporter: Reporter | None = None

    def doing() -> str:
        return trainer.doing() if trainer else "while starting"

    def on_exit() -> None:
        if reporter:
            reporter.stop()

    watch = Watch(store, control, list(run.labels), run.logs, doing, on_exit)
    try:
        chip = run.chips[rank]
        device = open_device(run.device, chip.file, chip.chip_type)
        connect(store, rank, world_size, device.backend)
        trainer = Trainer(run, device, control)
        if run.resume:
            trainer.restore()
        if rank == 0:
            reporter = Reporter(run.output, trainer.completed, run.steps, json_summary)
        _loop(trainer, reporter)
        _finish(trainer, reporter, json_summary)
        control.barrier("finish")
        watch.finish()
        dist.destroy_process_group()
    except torch.OutOfMemoryError as error:
        watch.fail(f"ran out of memory: {_one_line(error)}", wait_s=0)
    except (FileError, CheckpointError, DataError) as error:
        watch.fail(f"stopped: {_one_line(error)}", wait_s=0)
    except Exception as error:
        # the line that the watch prints has room for the error alone
        _keep_traceback(run.logs / f"rank-{rank}.traceback")
        watch.fail(f"failed: {type(error).__name__}: {_one_line(error)}")


def _loop(trainer: Trainer, reporter: Reporter | None) -> None:
    run = trainer.run
    while trainer.completed < run.steps:
        result, step_s = trainer.step()
        _share_metrics(trainer, reporter, result, step_s)
        last = trainer.completed == run.steps
        if last or (run.checkpoint_every and trainer.completed % run.checkpoint_every == 0):
            trainer.save()


def _share_metrics(
    trainer: Trainer, reporter: Reporter | None, result: StepResult, step_s: float
) -> None:
    key = f"metrics/{trainer.completed}"
    device, plan = trainer.device, trainer.run.plan
    own = [device.pacing_fidelity(), device.peak_memory_bytes()]
    trainer.control.publish(key, json.dumps(own))
    if reporter is None:
        return
    ranks = [json.loads(text) for text in trainer.control.collect(key)]
    trainer.control.forget(key)
    fidelities = [fidelity for fidelity, _ in ranks if fidelity is not None]
    reporter.step(
        StepMetrics(
            step=trainer.completed,
            loss=result.loss,
            learning_rate=trainer.run.hyperparameters.learning_rate_at(trainer.completed - 1),
            gradient_norm=result.gradient_norm,
            step_s=step_s,
            predicted_step_s=plan.prediction.step_s if plan.prediction else None,
            tokens_per_s=plan.global_batch * plan.model.sequence_length / step_s,
            pacing_fidelity=min(fidelities) if fidelities else None,
            peak_memory_bytes=tuple(peak for _, peak in ranks),
        )
    )


def _finish(trainer: Trainer, reporter: Reporter | None, json_summary: bool) -> None:
    """Gathers the trace of the median step and writes what the run leaves."""
    if not trainer.spans:
        if reporter:
            reporter.nothing_to_do()
        return
    if reporter:
        by_time = sorted(trainer.spans, key=lambda step: step[1])
        trainer.control.store.set("traced step", str(by_time[len(by_time) // 2][0]))
    traced = int(trainer.control.store.get("traced step"))
    spans = next(spans for step, _, spans in trainer.spans if step == traced)
    trainer.control.publish("spans", json.dumps([asdict(span) for span in spans]))
    if not reporter:
        return
    texts = trainer.control.collect("spans")
    measured = [Span(**span) for text in texts for span in json.loads(text)]
    reporter.trace(measured, _predicted(trainer.run), list(trainer.run.labels))
    summary = reporter.finish()
    assert summary is not None
    reporter.show(summary)
    if json_summary:
        print(as_json(summary), flush=True)


def _predicted(run: Run) -> list[Span]:
    if run.cluster is None:
        return []
    from heteropp.cluster import read_cluster
    from heteropp.simulate import simulate

    return simulate(run.plan, read_cluster(run.cluster), emulated=True).spans


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _keep_traceback(path: Path) -> None:
    with contextlib.suppress(FileError):
        write_text(path, traceback.format_exc())
