"""The modules of the ministages that a rank holds."""

from __future__ import annotations

import torch

from heteropp.description.plan import Plan
from heteropp.models.stage_module import StageModule
from heteropp.runtime.ranks.transport import Coordinates, Groups


def stage_modules(
    plan: Plan, place: Coordinates, groups: Groups, device: torch.device, seed: int
) -> list[StageModule]:
    """Returns the modules of a rank's ministages, in the stage's own order.

    Their parameters are not initialised. seed: that of dropout.
    """
    return [
        plan.model.build(
            layers,
            groups.tensor_parallel,
            device,
            getattr(torch, plan.model.dtype),
            selective_recompute=place.stage.selective_recompute,
            seed=seed,
            context=groups.context_parallel,
            experts=groups.expert_parallel,
        )
        for layers in place.layers
    ]
