"""Plans whose stages are alike, and what runs them."""

from __future__ import annotations

import torch

from heteropp.data.batch import Batch
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Pipeline, Plan, Replica, Schedule, Stage, validate
from heteropp.models.llama.model import LlamaModel
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.stage_module import StageModule
from heteropp.runtime.executor import Executor, StepResult
from heteropp.runtime.measuring.metrics import Clock
from heteropp.runtime.ranks.transport import Coordinates, Groups

HYPERPARAMETERS = Hyperparameters()
LEARNING_RATE = 1e-4


def even_plan(
    model: LlamaModel,
    schedule: Schedule,
    stages: int,
    micro_batches: int,
    micro_batch: int,
    ministages: int = 1,
    slack: int = 0,
    chip: str = "cpu",
) -> Plan:
    """One chip a stage, the layers dealt out evenly.

    slack: micro-batches that every stage of 1F1B holds beyond its own.
    """
    pipeline = Pipeline(
        micro_batches=micro_batches,
        stages=tuple(
            Stage(
                layers=(model.layers * s // stages, model.layers * (s + 1) // stages),
                recompute=False,
                replicas=(Replica(ranks=(s,), chip=chip, batch_share=micro_batch),),
                ministages=ministages,
                slack=slack,
            )
            for s in range(stages)
        ),
    )
    plan = Plan(
        model=model,
        global_batch=micro_batches * micro_batch,
        micro_batch=micro_batch,
        schedule=schedule,
        zero_stage=0,
        pipelines=(pipeline,),
    )
    validate(plan)
    return plan


def modules(plan: Plan, place: Coordinates, device: torch.device) -> list[StageModule]:
    """A rank's, one a ministage."""
    made = []
    for layers in place.layers:
        dtype = getattr(torch, plan.model.dtype)
        module = plan.model.build(layers, SoloGroup(), device, dtype)
        module.initialise(seed=0)
        made.append(module)
    return made


def tokens(plan: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets of a step, [global batch, length]."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, plan.global_batch, plan.model.sequence_length)
    drawn = torch.randint(plan.model.vocab, shape, generator=generator).to(device)
    return drawn[0], drawn[1]


class OurPipeline:
    """A rank of our executor that takes the same step again and again."""

    def __init__(
        self, plan: Plan, place: Coordinates, held: list[StageModule], clock: Clock
    ) -> None:
        self.executor = Executor(plan, place, Groups(place), held, HYPERPARAMETERS, clock)
        inputs, targets = tokens(plan, self.executor.device)
        micro_batches = plan.pipelines[0].micro_batches
        rows = plan.micro_batch * plan.model.sequence_length
        self.batch = Batch(
            inputs.view(micro_batches, rows),
            targets.view(micro_batches, rows),
            counted=targets.numel(),
            first_rows=range(0, micro_batches * rows, rows),
        )

    def step(self) -> StepResult:
        self.executor.submit(LEARNING_RATE, self.batch)
        return self.executor.finish()
