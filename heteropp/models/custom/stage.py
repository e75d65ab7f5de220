"""A stage of a user's model, as one rank of a tensor-parallel group holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from heteropp.models.custom.definition import ModelDefinition
from heteropp.models.custom.parts import held_part
from heteropp.models.documents import Documents
from heteropp.models.parallel.tensor_parallel import (
    SoloGroup,
    TensorParallelGroup,
    cross_entropy_sum,
)
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.stage_module import StageModule

if TYPE_CHECKING:
    from heteropp.models.custom.model import CustomModel


class CustomStage(StageModule):
    def __init__(
        self,
        model: CustomModel,
        definition: ModelDefinition,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, layers, group)
        self.length, self.hidden, self.vocab = model.sequence_length, model.hidden, model.vocab
        self.loss = definition.loss

        def part(name: str) -> nn.Module:
            return held_part(definition, name, group, device, dtype)

        if self.is_first:
            self.embedding = part("embedding")
        self.layers = nn.ModuleDict({str(i): part(model.block_kind(i)) for i in range(*layers)})
        if self.is_last:
            self.head = part("head")
        if self.is_first and self.is_last:
            for name, other in model.tied.items():
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, self.get_parameter(other))

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Documents | None = None,
        part: TokenSlice | None = None,
    ) -> Tensor:
        assert documents is None and part is None, "refused before anything starts"
        x = x.view(-1, self.length) if self.is_first else x.view(-1, self.length, self.hidden)
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if not self.is_last:
            return x.reshape(-1, self.hidden)
        assert targets is not None
        logits = self.head(x)
        logits = logits.reshape(-1, logits.shape[-1])
        if self.loss is not None:
            return self.loss(logits, targets)
        is_cut = logits.shape[-1] != self.vocab
        return cross_entropy_sum(logits, targets, self.group if is_cut else SoloGroup())
