"""The end of a step: sums of gradients, their norm over all ranks, clipping, update, gathering."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.models.stage_module import StageModule
from heteropp.optimizer.adamw import clip
from heteropp.optimizer.zero import FlatParameters
from heteropp.process_groups.collective import all_gather
from heteropp.runtime.measuring.metrics import Mark
from heteropp.runtime.ranks.transport import Coordinates, Groups
from heteropp.runtime.step.loss_scale import LossScale
from heteropp.runtime.step.sums import Sums, ToSelf

Accepts = Callable[[float, float], bool]  # of a loss and a gradient norm


@dataclass(frozen=True)
class UpdateResult:
    loss: float  # mean over the global batch's counted tokens
    gradient_norm: float  # before clipping
    skipped: bool  # it changed no parameter
    loss_scale: float  # that the gradients were computed with; 1 but of a float16 model
    step_marks: tuple[Mark, Mark, Mark]  # gradients summed, norms of this rank, norms of all


class Update:
    """Reduces the gradients of all ministages that a rank holds, and updates their parameters."""

    def __init__(
        self,
        plan: Plan,
        place: Coordinates,
        groups: Groups,
        modules: Sequence[StageModule],
        hyperparameters: Hyperparameters,
    ) -> None:
        self.hyperparameters = hyperparameters
        if hyperparameters.expert_bias_update_rate:
            for module in modules:
                module.count_expert_loads()
        # by ministage: one, or with expert parallelism the experts' beside it
        self.sections = [
            [
                FlatParameters(module, group, plan.zero_stage, hyperparameters, section.experts)
                for section, group in zip(place.sections, groups.data_parallel, strict=True)
            ]
            for module in modules
        ]
        self.flats = [flat for flats in self.sections for flat in flats]
        self.sums = [
            Sums(plan, place.rank, (place.pipeline_index, place.stage_index, k), flats)
            for k, flats in enumerate(self.sections)
        ]
        self.to_self: ToSelf = {}
        self.unsummed: list[int] = []  # ministages that are being reduced, in order
        names = [parameter.name for parameter in plan.model.parameters() if parameter.trains]
        self.column = {name: i for i, name in enumerate(names)}  # of the table of norms
        # brings a ministage's parameters from the host, where they are offloaded
        self.load_parameters: Callable[[int], None] | None = None
        self.scaler = LossScale() if plan.model.dtype == "float16" else None

    @property
    def loss_scale(self) -> float:
        """What the gradient of the loss is to be; gradients are that many times too large."""
        return self.scaler.scale if self.scaler else 1.0

    def each(self) -> Iterator[FlatParameters]:
        """Yields the buffers of the ministages in turn; one that was offloaded is on the chip in
        its turn.
        """
        for k, flats in enumerate(self.sections):
            if self.load_parameters:
                self.load_parameters(k)
            yield from flats

    def begin(self, ministage: int) -> None:
        """Zeroes a ministage's gradients before its first backward of a step.

        With ZeRO-2 the whole gradients of two ministages stand at once, one at work and one being
        reduced (Zorse, section 4.1.2).
        """
        if self.flats[0].zero_stage == 2:
            while len(self.unsummed) > 1:
                self._sum_next()
        for flat in self.sections[ministage]:
            flat.begin()

    def reduce(self, ministage: int) -> None:
        """Starts to sum a ministage's gradients over all ranks that hold its layers.

        It is called after the ministage's last backward.
        """
        for flat in self.sections[ministage]:
            flat.reduce()
        self.unsummed.append(ministage)
        while self.unsummed and all(f.is_reduced() for f in self.sections[self.unsummed[0]]):
            self._sum_next()

    def step(
        self, learning_rate: float, loss: Tensor, accepts: Accepts, mark: Callable[[], Mark]
    ) -> UpdateResult:
        """Sums, clips by the norm over all ranks, and updates if loss and norm are accepted.

        loss: this rank's part; over all ranks they sum up to the step's. The host reads the sum
        and the norm back before the update, the same on every rank, so that all decide alike.
        """
        self._finish_sums()
        summed = mark()
        row = self._row(loss)
        measured = mark()
        table = row.new_empty(dist.get_world_size() * len(row))
        all_gather(table, row)
        exchanged = mark()
        # On the host, because chips of unlike vendors would round these sums unlike.
        table = table.view(-1, len(row)).cpu()
        total = torch.linalg.vector_norm(torch.linalg.vector_norm(table[:, :-1], dim=0))
        mean_loss, norm = torch.stack((table[:, -1].sum(), total)).tolist()
        scale = self.loss_scale
        skipped = self._overflowed(mean_loss, norm) or not accepts(mean_loss, norm)
        if not skipped:
            self._apply(learning_rate, total.to(row.device))
        for flat in self.flats:
            flat.end()
        return UpdateResult(mean_loss, norm, skipped, scale, (summed, measured, exchanged))

    def _sum_next(self) -> None:
        """Starts the sum over the other places for the ministage that was reduced first.

        It waits until the replicas have summed that ministage's gradients.
        """
        self.sums[self.unsummed.pop(0)].start(self.to_self)

    def _finish_sums(self) -> None:
        while self.unsummed:
            self._sum_next()
        for sums in self.sums:
            sums.finish(self.to_self)
        self.to_self.clear()
        if self.scaler:
            for flat in self.flats:
                flat.reduced().mul_(1 / self.scaler.scale)

    def _row(self, loss: Tensor) -> Tensor:
        """[parameters + 1]: the norms that this rank answers for, and its part of the loss.

        Over all ranks every element of a parameter counts once, and with one rank a parameter the
        norm over the ranks is bit for bit the parameter's own.
        """
        none = torch.zeros_like(loss)
        norms = [none] * len(self.column)
        for flats, sums in zip(self.sections, self.sums, strict=True):
            for name, norm in (item for flat in flats for item in flat.norms().items()):
                if sums.speaks_for(name):
                    norms[self.column[name]] = norm
        return torch.stack([*norms, loss])

    def _overflowed(self, loss: float, norm: float) -> bool:
        """Whether gradients are not finite only because of the loss scale, which then adapts."""
        if self.scaler is None or not math.isfinite(loss):
            return False
        if math.isfinite(norm):
            self.scaler.went_well()
            return False
        return self.scaler.overflowed()

    def _apply(self, learning_rate: float, total: Tensor) -> None:
        gathers: list[dist.Work] = []
        for flat in self.each():
            clip(flat.reduced(), total, self.hyperparameters.gradient_clip)
            flat.update(learning_rate)
            if gather := flat.gather():
                gathers.append(gather)
            if self.load_parameters:  # it leaves when the next comes
                _wait(gathers)
        _wait(gathers)


def _wait(works: list[dist.Work]) -> None:
    while works:
        works.pop().wait()
