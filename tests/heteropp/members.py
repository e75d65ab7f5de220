"""Processes that train one plan after another and keep their state in between."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import forkserver
import numpy as np
import torch
import torch.distributed as dist
from parity import CLIP, RATE, WARMUP
from plain_llama import train_plainly
from training_run import write_text

from heteropp.data.source import open_tokens
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.layout.boxes import Box
from heteropp.models.spec import ModelSpec

DEADLINE_S = 120
Held = list[tuple[str, str, Box, np.ndarray]]  # quantity, parameter, box and values


@dataclass
class Told:
    """What a member says after a plan's steps."""

    losses: list[float]
    came: Held  # right after the switch
    leaves: Held  # after the steps
    sent_bytes: int  # in the switch
    planned_bytes: int


class Members:
    """The processes: over gloo on the host, or over dicomm on emulated chips of one chip file."""

    def __init__(self, count: int, model: ModelSpec, steps: int, chip: Path | None = None) -> None:
        self.model = model
        self.sent_bytes = self.planned_bytes = 0  # in all switches; over dicomm
        self.names = tuple(f"a-0/{i}" for i in range(count))
        self.steps = steps
        self.folder = tempfile.TemporaryDirectory()
        self.data = write_text(Path(self.folder.name, "text"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.plan: Plan | None = None
        self.members: tuple[str, ...] = ()
        self.turns = 0
        context = forkserver.context()
        self.processes: dict[str, Any] = {}
        self.pipes: dict[str, Connection] = {}
        for name in self.names:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, self.folder.name, self.store.port, name, steps, chip),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes[name], self.pipes[name] = process, ours

    def train(self, plan: Plan, members: Sequence[str], steps: int) -> dict[str, Told]:
        """Switches from the previous plan, if any, and trains; returns what each member says."""
        self.turns += 1
        members = tuple(members)
        used = dict.fromkeys((*members, *self.members))
        for name in used:
            self.pipes[name].send((self.turns, self.plan, self.members, plan, members, steps))
        self.plan, self.members = plan, members
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(answers) < len(used):
            waiting = {self.pipes[name]: name for name in used if name not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                answer = answers[waiting[pipe]] = pipe.recv()  # type: ignore[index]
                if isinstance(answer, str):
                    self.close()
                    raise AssertionError(f"{waiting[pipe]}: {answer}")  # type: ignore[index]
            if not ready:
                self.close()
                raise AssertionError(f"{list(waiting.values())} are not done")
        told = {name: answers[name] for name in members}
        self.sent_bytes += sum(answer.sent_bytes for answer in answers.values())
        self.planned_bytes += sum(answer.planned_bytes for answer in answers.values())
        return told

    def plainly(self, global_batch: int) -> list[float]:
        """The losses of all steps, in a plain loop in this process."""
        cache = Path(self.folder.name, "cache", "hyperhetero")
        tokens = open_tokens(self.data, cache)
        rate = RATE[self.model.dtype]
        losses, _, _ = train_plainly(
            self.model, tokens, self.steps, global_batch // 4, 4, rate, WARMUP, CLIP
        )
        return losses

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def whole(model: ModelSpec, told: dict[str, Held]) -> dict[tuple[str, str], np.ndarray]:
    """Every quantity of every parameter, put together; holders agree bit for bit."""
    shapes = {parameter.name: parameter.shape for parameter in model.parameters()}
    result: dict[tuple[str, str], np.ndarray] = {}
    known: dict[tuple[str, str], np.ndarray] = {}
    for member, held in told.items():
        for quantity, name, box, values in held:
            shape = shapes[name]
            everything = Box(tuple((0, size) for size in shape))
            key = quantity, name
            if key not in result:
                result[key], known[key] = np.zeros(shape, values.dtype), np.zeros(shape, bool)
            place = box.within(everything)
            there = known[key][place]
            assert np.array_equal(result[key][place][there], values[there]), (member, key)
            result[key][place] = values
            known[key][place] = True
    for key, there in known.items():
        assert there.all(), f"{key} is not held whole"
    return result


# ---------------------------------------------------------------- a member


def _serve(
    pipe: Connection, folder: str, port: int, name: str, steps: int, chip: Path | None
) -> None:
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
    member = _Member(Path(folder), dist.TCPStore("127.0.0.1", port), name, steps, chip)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # pytest is gone
            return
        try:
            pipe.send(member.train(*job))
        except BaseException:
            pipe.send(traceback.format_exc())


class _Member:
    def __init__(
        self, folder: Path, store: dist.Store, name: str, steps: int, chip: Path | None
    ) -> None:
        from heteropp.runtime.ranks.device import open_device

        self.folder, self.store, self.name = folder, store, name
        self.steps, self.chip = steps, chip
        self.device = open_device("chip" if chip else "cpu", str(chip), "NEUTRAL")
        self.trainer: Any = None

    def train(
        self,
        turn: int,
        old: Plan | None,
        old_members: tuple[str, ...],
        new: Plan,
        new_members: tuple[str, ...],
        steps: int,
    ) -> Told:
        from heteropp.process_groups.control import Control
        from heteropp.runtime.ranks.transport import connect
        from heteropp.runtime.trainer import Trainer

        position = buffers = None
        sent = planned = 0
        if old is not None:
            position, buffers, sent, planned = self._switch(
                turn, old, old_members, new, new_members
            )
        if self.name not in new_members:
            return Told([], [], [], sent, planned)
        store = dist.PrefixStore(f"generation {turn}", self.store)
        rank, world_size = new_members.index(self.name), len(new_members)
        connect(store, rank, world_size, self.device.backend, timeout_s=DEADLINE_S)
        control = Control(store, rank, world_size)
        self.trainer = Trainer(self._run(new), self.device, control)
        if position is not None:
            self.trainer.take_over(position, buffers)
        else:
            self.trainer.initialise()
        came = self._held()
        losses = [self.trainer.step().loss for _ in range(steps)]
        return Told(losses, came, self._held(), sent, planned)

    def _switch(
        self,
        turn: int,
        old: Plan,
        old_members: tuple[str, ...],
        new: Plan,
        new_members: tuple[str, ...],
    ) -> Any:
        from dicomm.distributed import bytes_sent
        from heteropp.process_groups.control import Control
        from heteropp.runtime.ranks.transport import connect
        from heteropp.state.slices.buffers import of_training, to_host
        from heteropp.state.switching.switch import Switch, move

        own, through_host = None, turn % 2 == 0
        if self.trainer is not None:
            own = self.trainer.position(), of_training(self.trainer.executor.update)
            self.trainer = None
            gc.collect()
            if through_host:
                to_host(own[1])
            dist.destroy_process_group()
        switch = Switch(old, new, old_members, new_members)
        rank = switch.members.index(self.name)
        store = dist.PrefixStore(f"switch {turn}", self.store)
        connect(store, rank, len(switch.members), self.device.backend, timeout_s=DEADLINE_S)
        table = switch.table()
        control = Control(store, rank, len(switch.members))
        device = torch.device("cpu") if through_host else self.device.device
        position, buffers = move(switch, table, control, own, device)
        sent = sum(bytes_sent().values()) if self.chip else 0
        dist.destroy_process_group()
        return position, buffers, sent, table.sent_bytes[rank]

    def _run(self, plan: Plan) -> Any:
        from heteropp.runtime.training_run import TrainingRun

        return TrainingRun(
            plan=plan,
            cluster=None,
            chips=(),
            steps=self.steps,
            output=self.folder / "run",
            data=self.folder / "text",
            weights=None,
            resume=False,
            resume_from=None,
            checkpoint_every=0,
            keep=1,
            deadline_s=DEADLINE_S,
            seed=0,
            hyperparameters=Hyperparameters(
                learning_rate=RATE[plan.model.dtype],
                warmup_steps=WARMUP,
                decay_steps=self.steps,
                gradient_clip=CLIP,
                # of models whose routers have a bias
                expert_bias_update_rate=0.01
                * any(map(plan.model.is_expert_bias, plan.model.parameters())),
            ),
            device="chip" if self.chip else "cpu",
        )

    def _held(self) -> Held:
        """Copies of the state, as the flat buffers themselves say what they hold."""
        held = []
        for flat in self.trainer.executor.update.each():
            for one in flat.layout.boxes():
                values = flat.values[one.first : one.last].view(one.box.shape)
                held.append(("parameter", one.name, one.box, _as_numpy(values)))
            start = flat.shard.start
            for piece in flat.pieces:
                for quantity, tensor in (
                    ("value", flat.master),
                    ("average", flat.optimizer.average),
                    ("average_square", flat.optimizer.average_square),
                ):
                    values = tensor[piece.first - start : piece.last - start]
                    values = values.view(piece.box.shape)
                    held.append((quantity, piece.name, piece.box, _as_numpy(values)))
        return held


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Exact; numpy knows no bfloat16."""
    wide = tensor if tensor.element_size() > 2 else tensor.float()
    return wide.detach().to("cpu", copy=True).numpy()
