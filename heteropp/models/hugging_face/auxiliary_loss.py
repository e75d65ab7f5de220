"""Which of transformers' families have an auxiliary loss that we train, and where its routers are.

They share one function for it, load_balancing_loss_func, whose definition models/auxiliary_loss.py
has for each sequence by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from heteropp.models.auxiliary_loss import AuxiliaryLoss
from heteropp.models.hugging_face.family import Family


def routers_of(found: Family, module: nn.Module) -> Iterator[nn.Module]:
    """Yields the routers of a part of a model, which return logits, weights and choices."""
    kind = found.model._can_record_outputs["router_logits"].target_class
    return (each for each in module.modules() if isinstance(each, kind))


def auxiliary_loss(found: Family, sources: list[int], tokens: int) -> AuxiliaryLoss:
    """Returns a model's auxiliary loss, as its family has it.

    sources: for each of its layers, a layer of the family's model that is like it; tokens: those of
    a sequence.
    """
    model: Any = found.model
    routers = sum(len(list(routers_of(found, found.base.layers[i]))) for i in sources)
    return AuxiliaryLoss(
        model.router_aux_loss_coef, model.num_experts, model.num_experts_per_tok, tokens * routers
    )
