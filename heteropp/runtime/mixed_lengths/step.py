"""A step over documents of mixed lengths: plan after plan, then one update.

The plan of the shortest sequences is home: it holds the optimizer's state and makes the update. The
others' parameters are copies of its, and their gradients are added to its; a rank that holds the
same in both has them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from heteropp.data.batch import Batch
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.models.stage_module import StageModule
from heteropp.optimizer.flat import FlatBuffers
from heteropp.runtime.evaluation import evaluate
from heteropp.runtime.executor import StepResult
from heteropp.runtime.measuring.metrics import Clock, Mark
from heteropp.runtime.measuring.waits import HostWaits
from heteropp.runtime.mixed_lengths.batches import MixedBatch
from heteropp.runtime.mixed_lengths.gradients import Gradients
from heteropp.runtime.mixed_lengths.parameters import Parameters, alike
from heteropp.runtime.mixed_lengths.plans import with_micro_batches
from heteropp.runtime.passes import Passes
from heteropp.runtime.ranks.transport import Coordinates, Groups
from heteropp.runtime.step.guard import Guard
from heteropp.runtime.step.update import Update
from heteropp.schedule.action import Action, Kind


class PlanOfLength:
    """A rank's share of one of the plans."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        groups: Groups,
        modules: Sequence[StageModule],
        sections: Sequence[Sequence[FlatBuffers]],
        clock: Clock,
    ) -> None:
        """sections: the flat buffers of each module."""
        self.plan, self.rank, self.groups = plan, rank, groups
        self.modules, self.sections, self.clock = modules, sections, clock
        self.flats = [flat for flats in sections for flat in flats]
        self.passes: dict[int, Passes] = {}  # by micro-batches

    def with_micro_batches(self, count: int) -> Passes:
        if count not in self.passes:
            plan = with_micro_batches(self.plan, count)
            place = Coordinates.of(plan, self.rank)
            self.passes[count] = Passes(
                plan, place, self.groups, self.modules, self.flats, self.clock
            )
        return self.passes[count]


class Away(PlanOfLength):
    """A rank's share of a plan that is not home."""

    def __init__(
        self,
        plan: Plan,
        home: PlanOfLength,
        groups: Groups,
        modules: Sequence[StageModule],
    ) -> None:
        """`modules`, uninitialised, are given home's parameters where both hold the same."""
        rank, sections = home.rank, home.sections
        self.shares = alike(home.plan, plan, rank)
        if self.shares:
            for module, ours in zip(modules, home.modules, strict=True):
                _give(module, ours)
        else:
            held = [section.experts for section in Coordinates.of(plan, rank).sections]
            sections = [
                [FlatBuffers(module, experts=experts) for experts in held] for module in modules
            ]
        super().__init__(plan, rank, groups, modules, sections, home.clock)
        self.parameters = Parameters(home.plan, plan, rank, home.flats, self.flats)
        self.gradients = Gradients(home.plan, plan, rank, home.sections, sections)
        self.is_old = True  # home's parameters have changed

    def fetch(self) -> None:
        """Brings the parameters up to date with home's."""
        if self.is_old:
            self.parameters.move()
            self.is_old = False

    def begin(self) -> None:
        for flat in [] if self.shares else self.flats:
            flat.begin()


class MixedLengths:
    """Executes the steps of a run of mixed lengths, as an executor does those of one plan."""

    def __init__(
        self,
        plans: Sequence[Plan],
        rank: int,
        groups: Sequence[Groups],
        modules: Sequence[Sequence[StageModule]],
        hyperparameters: Hyperparameters,
        clock: Clock,
    ) -> None:
        """Takes the plans, of which the first is home, and for each of them the rank's groups and
        the modules of its ministages.
        """
        self.clock = clock
        self.update = Update(
            plans[0], Coordinates.of(plans[0], rank), groups[0], modules[0], hyperparameters
        )
        self.guard = Guard(hyperparameters)
        self.home = PlanOfLength(plans[0], rank, groups[0], modules[0], self.update.sections, clock)
        self.away = [
            Away(plan, self.home, own_groups, own_modules)
            for plan, own_groups, own_modules in zip(
                plans[1:], groups[1:], modules[1:], strict=True
            )
        ]
        self.running: Passes | None = None
        self.own: Action | None = None  # what runs now that is not an action of any plan
        self.marks: list[tuple[Action, Mark, Mark]] = []
        self.waits = HostWaits()

    @property
    def current(self) -> Action | None:
        """What this rank is doing."""
        return self.own or (self.running.current if self.running else None)

    def submit(self, learning_rate: float, batch: MixedBatch) -> None:
        """Runs all of a step but the update."""
        self.learning_rate, self.marks, self.waits = learning_rate, [], HostWaits()
        self.tokens = batch.counted
        flat = self.update.flats[0]
        self.loss = torch.zeros((), device=flat.values.device, dtype=flat.wide)
        for flat in self.update.flats:
            flat.begin()
        self._accumulate(self.home, batch.passes[0])
        for plan, passes in zip(self.away, batch.passes[1:], strict=True):
            if not passes:  # the same on all ranks
                continue
            with self._marked(Kind.SWITCH):
                plan.fetch()
                plan.begin()
            self._accumulate(plan, passes)
            with self._marked(Kind.SWITCH):
                plan.gradients.move()
        for k in range(len(self.update.sections)):
            with self._marked(Kind.REDUCE, k):
                self.update.reduce(k)

    def finish(self) -> StepResult:
        """Updates the parameters, and waits until the step is done."""
        self.guard.warning = None
        with self._marked(Kind.STEP):
            outcome = self.update.step(
                self.learning_rate, self.loss, self.guard.judging(self.tokens), self.clock.mark
            )
        for plan in self.away:
            plan.is_old |= not outcome.skipped
        return StepResult(**vars(outcome), marks=self.marks, tokens=self.tokens, waits=self.waits)

    def evaluate(self, batch: MixedBatch) -> float:
        """The loss of documents that are only tried on; every rank gets the same."""
        total = 0.0
        for plan, passes in zip([self.home, *self.away], batch.passes, strict=True):
            if passes and isinstance(plan, Away):
                plan.fetch()
            for count, part in passes:
                total += evaluate(plan.with_micro_batches(count), part)
        return total

    def _accumulate(self, plan: PlanOfLength, passes: Sequence[tuple[int, Batch]]) -> None:
        for count, part in passes:
            self.running = plan.with_micro_batches(count)
            self.running.loss_scale = self.update.loss_scale
            self.running.accumulate(part)
            self.loss += self.running.loss_contribution()
            self.marks += self.running.marks
            self.waits.add(self.running.waits)

    @contextmanager
    def _marked(self, kind: Kind, ministage: int = 0) -> Iterator[None]:
        begin, self.own = self.clock.mark(), Action(kind, None, ministage)
        yield
        self.marks.append((self.own, begin, self.clock.mark()))
        self.own = None


def _give(module: nn.Module, source: nn.Module) -> None:
    """Makes a module's parameters those of another."""
    for name, parameter in source.named_parameters(remove_duplicate=False):
        where, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(where), leaf, parameter)
