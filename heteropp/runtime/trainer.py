"""One rank's share of a run: its stages, its data, and the state that they come to."""

from __future__ import annotations

import time
from collections import deque
from functools import cache
from typing import Any

from heteropp.data.sequences import Sequences
from heteropp.data.source import open_tokens
from heteropp.data.token_file import TokenFile
from heteropp.data.whole_documents import WholeDocuments
from heteropp.description.timeline import Span, in_words
from heteropp.process_groups.control import Control
from heteropp.runtime.evaluation import Validation
from heteropp.runtime.executor import Executor, StepResult
from heteropp.runtime.measuring.gauges import Expect, Gauges
from heteropp.runtime.measuring.sent import SentBytes
from heteropp.runtime.mixed_lengths.batches import MixedBatches
from heteropp.runtime.mixed_lengths.plans import what_is_learnt
from heteropp.runtime.mixed_lengths.step import MixedLengths
from heteropp.runtime.ranks.device import Device, check_attention, set_links
from heteropp.runtime.ranks.transport import Coordinates, Groups
from heteropp.runtime.stage_modules import stage_modules
from heteropp.runtime.step.batches import Batches, check_same_data
from heteropp.runtime.training_run import TrainingRun
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    Manifest,
    check_resumable,
)
from heteropp.state.checkpoint.reader import Reader
from heteropp.state.checkpoint.writer import Writer
from heteropp.state.hugging_face.weights import load_weights
from heteropp.state.slices.buffers import Buffers, fill
from heteropp.state.slices.state import State
from heteropp.state.switching.switch import Position

TRACED_STEPS = 64  # a trace shows the median of the newest

opened = cache(open_tokens)  # once a process: its later plans train on the same tokens


class Trainer:
    """One rank's share of a run; it begins with `initialise`, `restore` or `take_over`."""

    def __init__(
        self, run: TrainingRun, device: Device, control: Control, expect: Expect | None = None
    ) -> None:
        """Raises ModelError for a model that the device does not train.

        expect: gives what a step is held against; None: nothing is.
        """
        self.run, self.device, self.control = run, device, control
        plan = run.plan
        self.place = Coordinates.of(plan, control.rank)
        self.groups = Groups(self.place)
        if run.cluster is not None:
            set_links(run.plan, run.cluster, self.groups)
        self.modules = stage_modules(plan, self.place, self.groups, device.device, run.seed)
        apart = run.within_documents or any(each.has_windows for each in self.modules)
        cut = self.place.stage.cp > 1 or self.place.pipeline.slices > 1
        check_attention(plan.model, device, apart, cut)
        self.executor = self._executor()
        self.tokens = opened(run.data)
        self.batches = self._batches(self.tokens, "data", run.seed)
        self.validation = {
            name: self._batches(opened(path), f"validation {name}")
            for name, path in run.validation.items()
        }
        self.state = State(self.executor.update, self.executor.guard)
        one_plan = not run.by_length
        groups = [group for own in self.every_groups for group in own.every()]
        sent = SentBytes(groups) if run.device == "chip" else None
        self.gauges = Gauges(
            plan, run.cluster, control.rank, run.labels, device, one_plan, expect, sent
        )
        self.completed = 0
        self.steps_here = 0  # that this trainer has trained
        self.ended_s = time.time()  # when the newest step did, by the time of day
        self.batch: Any = None  # what the executor takes, of the next step, once made
        # (step, its seconds, when its actions ran)
        self.spans: deque[tuple[int, float, list[Span]]] = deque(maxlen=TRACED_STEPS)

    def _executor(self) -> Executor | MixedLengths:
        run, settings = self.run, (self.run.hyperparameters, self.device.clock)
        self.every_groups = groups = [self.groups]  # by length of sequence
        if not run.by_length:
            return Executor(run.plan, self.place, self.groups, self.modules, *settings)
        modules = [self.modules]
        for plan in run.by_length[1:]:
            place = Coordinates.of(plan, self.place.rank)
            groups[-1].make_up(place.rank)
            groups.append(Groups(place))
            if run.cluster is not None:
                set_links(run.plan, run.cluster, groups[-1])
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
        sequences = Sequences(tokens, run.plan.model, seed, run.attention_within)
        return Batches(sequences, run.plan, self.place, device)

    def doing(self) -> str:
        """Says what this rank is doing, for the line that it prints as it ends."""
        action = self.executor.current
        if action is None:
            return f"between steps {self.completed} and {self.completed + 1}"
        where = ""
        if action.micro_batch is not None:
            named = in_words(action.micro_batch, self.place.pipeline.slices)
            where = f" of micro-batch {named}"
        return f"in {action.kind}{where}, step {self.completed + 1}"

    def step(self) -> StepResult:
        """Trains one step; `reading` is then what this rank measured of it."""
        self.device.begin_step()
        self.gauges.begin()
        learning_rate = self.run.hyperparameters.learning_rate_at(self.completed)
        batch = self.batch or self._batch(self.completed)
        self.executor.submit(learning_rate, batch)
        if self.completed + 1 < self.run.steps:
            self.batch = self._batch(self.completed + 1)  # while the device is busy
        result = self.executor.finish()
        self.ended_s = time.time()
        self.reading = self.gauges.read(result)
        self.completed += 1
        self.steps_here += 1
        self.device.end_step()
        self.spans.append((self.completed, self.reading.step_s, self.gauges.spans(result)))
        return result

    def validate(self) -> Validation | None:
        """Returns the losses over all validation data, or None where they are not due."""
        if not self.run.validates(self.completed):
            return None
        totals = {name: self._total(batches) for name, batches in self.validation.items()}
        loss, counted = (sum(figures) for figures in zip(*totals.values(), strict=True))
        by_name = {name: total / tokens for name, (total, tokens) in totals.items()}
        return Validation(loss / counted, by_name)

    def _total(self, batches: Batches | MixedBatches) -> tuple[float, int]:
        """Returns the sum of the losses of all tokens that count, and how many those are."""
        total, counted = 0.0, 0
        for first in range(0, batches.sequences.count, batches.global_batch):
            batch: Any = batches.at(first)
            total += self.executor.evaluate(batch) * batch.counted
            counted += batch.counted
        return total, counted

    def _batch(self, step: int) -> Any:
        return self.batches.at(step * self.batches.global_batch)

    def manifest(self) -> Manifest:
        """Returns what a checkpoint of this step says of the run."""
        return Manifest(
            step=self.completed,
            **what_is_learnt(
                self.run.plan,
                self.run.by_length,
                self.run.documents,
                self.run.attention_within,
            ),
            seed=self.run.seed,
            tokens_sha256=self.tokens.sha256,
            hyperparameters=self.run.hyperparameters,
            scalars=self.state.scalars(),
        )

    def save(self, writer: Writer) -> None:
        """Saves a checkpoint; every rank must call it."""
        writer.save(self.manifest(), self.state.held())

    def initialise(self) -> None:
        """Begins at step 0. Raises FileError where the weights to start from are bad."""
        for flat in self.executor.update.each():
            if self.run.weights is None:
                flat.module.initialise(self.run.seed)
            else:
                load_weights(self.run.weights, flat.module)
                flat.module.initialise(self.run.seed, added_alone=True)
            flat.take_values()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, of whichever plan. Raises CheckpointError."""
        check_resumable(checkpoint, self.manifest())
        self.state.restore(Reader(checkpoint), checkpoint.manifest.scalars)
        self.completed = checkpoint.manifest.step

    def position(self) -> Position:
        """Returns where the training stands, besides its tensors."""
        return Position(self.completed, self.state.scalars(), self.ended_s)

    def take_over(self, position: Position, buffers: Buffers) -> None:
        """Goes on from another plan's state, which was moved to buffers of this plan and rank."""
        fill(self.executor.update, buffers)
        self.state.take(position.scalars)
        self.completed = position.step
