"""A rank of torch.distributed.pipelining with our stage modules, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from heteropp.description.plan import Plan, ministage_layers
from heteropp.models.stage_module import StageModule
from pipelines.stages import HYPERPARAMETERS, LEARNING_RATE


class Part(nn.Module):
    """A stage module in torch's shape; the last one gives the loss, and needs the targets."""

    def __init__(self, module: StageModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x.flatten() if self.module.is_first else x
        if not self.module.is_last:
            return self.module(x)
        assert targets is not None
        return self.module(x, targets.flatten())


@dataclass(frozen=True)
class Stepped:
    loss: float  # 0 where the last stage is not


class TorchPipelining:
    """1F1B of one module a rank, ZBV of two."""

    def __init__(
        self,
        plan: Plan,
        modules: Sequence[StageModule],
        tokens: Tensor,
        targets: Tensor,
    ) -> None:
        """tokens, targets: of a step, [global batch, length]."""
        every = ministage_layers(plan.pipelines[0], plan.schedule)
        parts = sorted(layers for own in every for layers in own)
        held = [
            PipelineStage(Part(module), parts.index(module.layer_range), len(parts), tokens.device)
            for module in modules
        ]
        counted = targets.numel()
        settings = {
            "n_microbatches": plan.pipelines[0].micro_batches,
            "loss_fn": lambda loss, _: loss / counted,
            "scale_grads": False,  # by the number of micro-batches: the loss is divided already
        }
        self.schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if len(held) == 1:
            self.schedule = Schedule1F1B(held[0], **settings)
        else:
            self.schedule = ScheduleZBVZeroBubble(held, **settings)
        self.arguments = (tokens,) if any(module.is_first for module in modules) else ()
        self.targets = targets if any(module.is_last for module in modules) else None
        self.parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=LEARNING_RATE,
            betas=(HYPERPARAMETERS.beta1, HYPERPARAMETERS.beta2),
            eps=HYPERPARAMETERS.epsilon,
            weight_decay=HYPERPARAMETERS.weight_decay,
        )

    def step(self) -> Stepped:
        """One optimizer step."""
        losses: list[Tensor] = []
        last = {}
        if self.targets is not None:
            last = {"target": self.targets, "targets": self.targets, "losses": losses}
        self.schedule.step(*self.arguments, return_outputs=False, **last)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(squared)
        clip = HYPERPARAMETERS.gradient_clip
        torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, squared.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Stepped(sum(loss.item() for loss in losses))
