"""Runs a step of a plan for real: its forwards and backwards, its reductions and its update.

The host waits for the device once a step: it reads the loss and the gradient norm back before the
update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heteropp.data.batch import Batch
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.models.stage_module import StageModule
from heteropp.runtime.evaluation import evaluate
from heteropp.runtime.measuring.metrics import Clock, Mark
from heteropp.runtime.measuring.waits import HostWaits
from heteropp.runtime.passes import Passes
from heteropp.runtime.ranks.transport import Coordinates, Groups
from heteropp.runtime.step.guard import Guard
from heteropp.runtime.step.offload import Offload
from heteropp.runtime.step.update import Update, UpdateResult
from heteropp.schedule.action import BACKWARD, Action, Kind


@dataclass(frozen=True)
class StepResult(UpdateResult):
    marks: list[tuple[Action, Mark, Mark]]  # when each action began and ended
    tokens: int  # that it trained on
    waits: HostWaits  # for messages between stages


class Executor(Passes):
    def __init__(
        self,
        plan: Plan,
        place: Coordinates,
        groups: Groups,
        modules: Sequence[StageModule],
        hyperparameters: Hyperparameters,
        clock: Clock,
    ) -> None:
        """`modules`: one for each ministage of the stage, in its own order."""
        self.update = Update(plan, place, groups, modules, hyperparameters)
        super().__init__(plan, place, groups, modules, self.update.flats, clock)
        # the one that a ministage's backwards begin with
        self.first = {a.ministage: a.micro_batch for a in self.actions[::-1] if a.kind in BACKWARD}
        if place.stage.offload:
            self.offload = Offload(self.actions, self.update.sections)
            self.update.load_parameters = self.offload.load_for_update
        self.guard = Guard(hyperparameters)
        self.tokens = plan.global_batch * plan.model.sequence_length

    def submit(self, learning_rate: float, batch: Batch) -> None:
        """Starts all of a step but the update; the host is back long before the device is."""
        self.learning_rate, self.loss_scale = learning_rate, self.update.loss_scale
        self.begin(batch)
        for action in self.actions[:-1]:
            self._run(action)

    def finish(self) -> StepResult:
        """Updates the parameters, and waits until the step is done."""
        self._run(self.actions[-1])
        self.end()
        return StepResult(
            **vars(self.outcome), marks=self.marks, tokens=self.tokens, waits=self.waits
        )

    def evaluate(self, batch: Batch) -> float:
        """Returns the loss of a batch that is not trained on; every rank gets the same."""
        return evaluate(self, batch)

    def _do(self, action: Action) -> None:
        if action.kind == Kind.REDUCE:
            self.update.reduce(action.ministage)
        elif action.kind == Kind.STEP:
            self.guard.warning = None  # of the step before; an overflow of float16 brings none
            self.outcome = self.update.step(
                self.learning_rate,
                self.loss_contribution(),
                self.guard.judging(self.batch.counted),
                self.clock.mark,
            )
        else:
            if action.kind in BACKWARD and action.micro_batch == self.first[action.ministage]:
                self.update.begin(action.ministage)
            super()._do(action)
