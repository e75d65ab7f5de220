"""Trains plans on ranks forked once, and gathers what a plain loop is held against."""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forkserver
import numpy as np
import torch
import torch.distributed as dist
from plain_llama import adamw, plain_loss, train_plainly
from torch import Tensor
from training_run import write_text

from heteropp.data.sequences import AttentionWithin
from heteropp.data.source import open_tokens
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan, validate
from heteropp.layout.boxes import Box

STEPS, WARMUP, CLIP = 5, 2, 0.3
# Adam divides by the gradient's own size: where a gradient nearly cancels, its float32 noise comes
# out times the learning rate, so a high rate would test Adam's conditioning and not the layout
RATE = {"float32": 2e-5, "float64": 3e-3, "bfloat16": 1e-3, "float16": 1e-3}
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}
DEADLINE_S = 120


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]  # whole
    validation_loss: float  # at the end
    forwards: list[Counter[str]]  # by rank: how often each layer ran
    peak_memory_bytes: list[int]  # by rank: in a step, on a chip
    sent_bytes: list[Counter[int]]  # by rank, to each peer: boundary tensors, as dicomm counts
    messages_bytes: list[Counter[int]]  # by rank, to each peer: what is sent point to point
    posted_bytes: list[int]  # by rank: the most that waited for boundary tensors at once
    host_bytes: list[int]  # by rank: the most that was offloaded to host memory at once


class RankError(Exception):
    """A rank raised; its traceback is the message."""


class Ranks:
    """Processes that train one plan after another, as many of them as it needs.

    On the host over gloo, or on emulated chips over dicomm, all as a chip file says, or each as
    its own.
    """

    def __init__(self, chip: Path | None = None, chips: Sequence[Path] = ()) -> None:
        """chips: by rank, in place of one for all."""
        self.chip, self.chips = chip, chips
        self.folder = tempfile.TemporaryDirectory()
        self.data = write_text(Path(self.folder.name, "text"))
        self.validation = write_text(Path(self.folder.name, "validation"), 400)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.jobs = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def train(
        self,
        plan: Plan,
        steps: int = STEPS,
        checkpoints: Path | None = None,
        poisoned: int | None = None,
        by_length: Sequence[Plan] = (),
        documents: int = 0,
        data: Path | None = None,
        weights: Path | None = None,
        validation: Path | None = None,
        within: AttentionWithin = "sequence",
        settings: dict[str, Any] | None = None,
    ) -> Trained:
        """Runs a plan's steps. Raises RankError.

        checkpoints: a folder whose newest checkpoint the run goes on from, and to which it saves
        when it is done; poisoned: a step in which a micro-batch of rank 0 comes to NaN; by_length:
        the plans, of which `plan` is the first, of mixed lengths, with so many documents a step;
        weights: a Hugging Face folder to begin from; within: where attention stays; settings:
        hyperparameters that are not the usual ones.
        """
        validate(plan)
        while len(self.pipes) < plan.world_size:
            self._start()
        self.jobs += 1
        used = self.pipes[: plan.world_size]
        for rank, pipe in enumerate(used):
            job = f"job {self.jobs}"
            learns = tuple(by_length), documents, data, weights, validation, within, settings or {}
            pipe.send((plan, rank, steps, job, checkpoints, poisoned, *learns))
        answers, failures = [], []
        for rank, pipe in enumerate(used):
            if not pipe.poll(DEADLINE_S):
                failures.append(f"rank {rank} is not done after {DEADLINE_S} s")
                break  # as it may wait for one that failed
            answers.append(pipe.recv())
            if isinstance(answers[-1], str):
                failures.append(f"rank {rank}: {answers[-1]}")
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        losses, norms, validation_loss = answers[0][:3]
        # as text, in which nan is nan
        assert len({str(answer[:3]) for answer in answers}) == 1
        parameters = _whole(plan, [answer[3] for answer in answers])
        by_rank = [[answer[i] for answer in answers] for i in range(4, 10)]
        return Trained(losses, norms, parameters, validation_loss, *by_rank)

    def plainly(
        self,
        plan: Plan,
        steps: int = STEPS,
        without: int | None = None,
        weights: Path | None = None,
        optimizers_of: Callable[[Any, torch.nn.Module], list[torch.optim.Optimizer]] = adamw,
    ) -> Trained:
        """The same steps in a plain loop, in this process; one of them changes nothing."""
        cache = Path(self.folder.name, "cache", "hyperhetero")
        losses, norms, parameters = train_plainly(
            plan.model,
            open_tokens(self.data, cache),
            steps,
            plan.micro_batch,
            sum(pipeline.micro_batches for pipeline in plan.pipelines),
            RATE[plan.model.dtype],
            WARMUP,
            CLIP,
            without=without,
            weights=weights,
            optimizers_of=optimizers_of,
        )
        if weights is None:  # else gradients are as they are
            assert all(norm > CLIP for norm in norms), "clipping must be active"
        validation = open_tokens(self.validation, cache)
        validation_loss = plain_loss(plan.model, parameters, validation)
        return Trained(losses, norms, parameters, validation_loss, [], [], [], [], [], [])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        context = forkserver.context()
        chip = self.chips[len(self.pipes)] if self.chips else self.chip
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, self.folder.name, self.store.port, chip),
            daemon=True,
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)


Held = list[tuple[str, Box, np.ndarray]]  # slices of parameters, some of them twice


def _whole(plan: Plan, held: list[Held]) -> dict[str, Tensor]:
    """Parameters put together from the slices of all ranks, who agree bit for bit."""
    whole = {}
    for parameter in plan.model.parameters():
        value = torch.full(parameter.shape, torch.nan, dtype=getattr(torch, plan.model.dtype))
        everything = Box(tuple((0, size) for size in parameter.shape))
        for rank, slices in enumerate(held):
            for name, box, content in slices:
                if name != parameter.name:
                    continue
                piece = value[box.within(everything)]
                known = ~piece.isnan()
                ours = torch.from_numpy(content).to(value.dtype)
                assert torch.equal(piece[known], ours[known]), f"{name} of rank {rank}"
                piece.copy_(ours)
        assert not value.isnan().any(), f"{parameter.name} is not held whole"
        whole[parameter.name] = value
    return whole


# ---------------------------------------------------------------- a rank


def _serve(pipe: Connection, folder: str, port: int, chip: Path | None) -> None:
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # pytest is gone
            return
        try:
            pipe.send(_train(*job, folder=Path(folder), store=store, chip=chip))
            gc.collect()
        except BaseException:
            pipe.send(traceback.format_exc())


def _train(
    plan: Plan,
    rank: int,
    steps: int,
    job: str,
    checkpoints: Path | None,
    poisoned: int | None,
    by_length: tuple[Plan, ...],
    documents: int,
    data: Path | None,
    weights: Path | None,
    validation: Path | None,
    within: AttentionWithin,
    settings: dict[str, Any],
    folder: Path,
    store: dist.Store,
    chip: Path | None,
) -> Any:
    from heteropp.models.llama.stage import Layer
    from heteropp.process_groups.control import Control
    from heteropp.runtime.ranks.device import open_device
    from heteropp.runtime.ranks.transport import connect
    from heteropp.runtime.trainer import Trainer
    from heteropp.runtime.training_run import TrainingRun
    from heteropp.state.checkpoint.manifest import find
    from heteropp.state.checkpoint.writer import Writer

    run = TrainingRun(
        plan=plan,
        cluster=None,
        chips=(),
        steps=steps,
        output=folder / "run",
        data=data or folder / "text",
        validation={"text": validation or folder / "validation"},
        attention_within=within,
        validate_every=max(3, steps // 3),
        weights=weights,
        resume=False,
        resume_from=None,
        checkpoint_every=0,
        keep=1,
        deadline_s=DEADLINE_S,
        seed=0,
        hyperparameters=replace(
            Hyperparameters(
                learning_rate=RATE[plan.model.dtype],
                warmup_steps=WARMUP,
                decay_steps=max(steps, STEPS),
                gradient_clip=CLIP,
            ),
            **settings,
        ),
        device="chip" if chip else "cpu",
        by_length=by_length,
        documents=documents,
    )
    plan.model.allow_code(trust_remote_code=True)  # for the tests' own families
    store = dist.PrefixStore(job, store)
    device = open_device(run.device, str(chip), "NEUTRAL")
    connect(store, rank, plan.world_size, device.backend, timeout_s=DEADLINE_S)
    control = Control(store, rank, plan.world_size)
    trainer = Trainer(run, device, control)
    if checkpoints and (checkpoint := find(checkpoints)):
        trainer.restore(checkpoint)
    else:
        trainer.initialise()
    forwards: Counter[str] = Counter()
    for module in trainer.modules:
        for name, part in module.named_modules():
            if isinstance(part, Layer):
                part.register_forward_pre_hook(
                    lambda part, _, name=name: forwards.update([name] if part.training else [])
                )
                if rank == 0 and poisoned is not None:
                    part.register_forward_hook(_poison(trainer, poisoned))
    sent, posted, offloaded = Counter[int](), [0], [0]
    if not by_length:
        sent, posted = watch_boundaries(trainer.executor, counted=chip is not None)
        if trainer.executor.offload:
            offloaded = watch_host_copies(trainer.executor.offload.link)
    losses, norms, validation, peak_bytes = [], [], None, 0
    messages: Counter[int] = Counter()
    while trainer.completed < steps:
        with given_to_isend(messages):
            result = trainer.step()
        peak_bytes = max(peak_bytes, device.peak_memory_bytes())
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        validation = trainer.validate()  # after the third step too: what follows is the same
    held = [
        (held.name, held.box, _as_numpy(flat.values[held.first : held.last].view(held.box.shape)))
        for flat in trainer.executor.update.each()
        for held in flat.layout.boxes()
    ]
    if checkpoints:
        writer = Writer(checkpoints, control, 2, on_error=print)
        trainer.save(writer)
        writer.finish()
        control.barrier("saved")
    dist.destroy_process_group()
    result = losses, norms, validation.loss if validation else None, held
    return *result, forwards, peak_bytes, sent, messages, max(posted), max(offloaded)


def watch_host_copies(link: Any) -> list[int]:
    """Returns the bytes on the host, whenever a copy of what a stage offloads comes there or goes.

    link: the stage's way to its host.
    """
    held, to_host = [0], link.to_host

    def watched(storage: torch.UntypedStorage) -> Tensor:
        copy: Tensor = to_host(storage)
        held.append(held[-1] + copy.nbytes)
        weakref.finalize(copy, lambda size=copy.nbytes: held.append(held[-1] - size))
        return copy

    link.to_host = watched
    return held


@contextmanager
def given_to_isend(found: Counter[int]) -> Iterator[None]:
    """Counts the bytes by peer."""
    isend = dist.isend

    def counted(tensor: Tensor, dst: int, *rest: Any, **named: Any) -> Any:
        found[dst] += tensor.nbytes
        return isend(tensor, dst, *rest, **named)

    dist.isend = counted
    try:
        yield
    finally:
        dist.isend = isend


def watch_boundaries(executor: Any, counted: bool) -> tuple[Counter[int], list[int]]:
    """Bytes sent by peer in the actions before each update, and bytes posted after each action."""
    from dicomm.distributed import bytes_sent

    sent: Counter[int] = Counter()
    posted, run = [0], executor._run

    def watched(action: Any) -> None:
        if counted and action is executor.actions[0]:
            sent.subtract(bytes_sent())
        if counted and action is executor.actions[-1]:
            for outbox in executor.outboxes.values():
                outbox.finish()
            sent.update(bytes_sent())
        run(action)
        tensors = (tensor for box in executor.inboxes.values() for tensor, _ in box.posted)
        posted.append(sum(tensor.nbytes for tensor in tensors))

    executor._run = watched
    return sent, posted


def _as_numpy(parameter: Tensor) -> np.ndarray:
    """Exact; numpy knows no bfloat16."""
    wide = parameter if parameter.element_size() > 2 else parameter.float()
    return wide.detach().to("cpu", copy=True).numpy()


def _poison(trainer: Any, step: int) -> Callable[..., Tensor | None]:
    """A hook that makes one micro-batch of a step come to NaN."""
    poisoned = []

    def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor | None:
        if trainer.completed == step and not poisoned:
            poisoned.append(step)
            return output * torch.nan
        return None

    return hook
