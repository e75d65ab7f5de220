"""One stage of a GPT-2: LayerNorm, causal attention and a GELU's MLP, all with biases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heteropp.models.documents import Documents
from heteropp.models.parallel.backward import linear
from heteropp.models.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    SoloGroup,
    TensorParallelGroup,
    VocabularyParallelEmbedding,
    copy_to_group,
    cross_entropy_sum,
)
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.stage_module import StageModule

if TYPE_CHECKING:
    from heteropp.models.gpt2.model import GPT2Model


class GPT2Attention(nn.Module):
    """Causal attention over this rank's share of the heads."""

    def __init__(self, model: GPT2Model, group: TensorParallelGroup, **kind: Any) -> None:
        super().__init__()
        self.heads, self.length = model.heads // group.size, model.sequence_length
        kind = {"bias": True, **kind}
        self.query = ColumnParallelLinear(model.hidden, model.hidden, group, **kind)
        self.key = ColumnParallelLinear(model.hidden, model.hidden, group, **kind)
        self.value = ColumnParallelLinear(model.hidden, model.hidden, group, **kind)
        self.output = RowParallelLinear(model.hidden, model.hidden, group, **kind)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        def by_head(y: Tensor) -> Tensor:
            return y.view(-1, self.length, self.heads, y.shape[1] // self.heads).transpose(1, 2)

        query, key, value = (by_head(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(2, 3)
        weights = torch.add(mask, scores, alpha=query.shape[-1] ** -0.5).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).reshape(x.shape[0], -1))


class GPT2MLP(nn.Module):
    def __init__(self, model: GPT2Model, group: TensorParallelGroup, **kind: Any) -> None:
        super().__init__()
        kind = {"bias": True, **kind}
        self.up = ColumnParallelLinear(model.hidden, model.intermediate, group, **kind)
        self.down = RowParallelLinear(model.intermediate, model.hidden, group, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GPT2Layer(nn.Module):
    def __init__(self, model: GPT2Model, group: TensorParallelGroup, **kind: Any) -> None:
        super().__init__()
        self.group = group
        self.attention_norm = nn.LayerNorm(model.hidden, model.norm_eps, **kind)
        self.attention = GPT2Attention(model, group, **kind)
        self.mlp_norm = nn.LayerNorm(model.hidden, model.norm_eps, **kind)
        self.mlp = GPT2MLP(model, group, **kind)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(copy_to_group(self.attention_norm(x), self.group), mask)
        return x + self.mlp(copy_to_group(self.mlp_norm(x), self.group))


class WholeHead(nn.Module):
    """[rows, hidden] to [rows, vocab], on every rank."""

    def __init__(self, model: GPT2Model, **kind: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden, **kind))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class GPT2Stage(StageModule):
    mask: Tensor  # [length, length]

    def __init__(
        self,
        model: GPT2Model,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, layers, group)
        kind: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.vocabulary_group = group if model.cuts_vocabulary else SoloGroup()
        if self.is_first:
            self.embedding = VocabularyParallelEmbedding(
                model.vocab, model.hidden, self.vocabulary_group, **kind
            )
            self.positions = nn.Embedding(model.positions, model.hidden, **kind)
        self.layers = nn.ModuleDict(
            {str(i): GPT2Layer(model, group, **kind) for i in range(*layers)}
        )
        if self.is_last:
            self.norm = nn.LayerNorm(model.hidden, model.norm_eps, **kind)
            self.head: nn.Module = (
                ColumnParallelLinear(model.hidden, model.vocab, group, **kind)
                if model.cuts_vocabulary
                else WholeHead(model, **kind)
            )
        if self.is_first and self.is_last and model.tied_embeddings:
            self.head.weight = self.embedding.weight
        mask = torch.full((model.sequence_length, model.sequence_length), -math.inf).triu(1)
        self.register_buffer("mask", mask.to(dtype).to(device), persistent=False)

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Documents | None = None,
        part: TokenSlice | None = None,
    ) -> Tensor:
        assert documents is None and part is None, "refused before anything starts"
        if self.is_first:
            length = len(self.mask)
            x = self.embedding(x).view(-1, length, self.model.hidden)
            x = (x + self.positions.weight[:length]).view(-1, self.model.hidden)
        for layer in self.layers.values():
            x = layer(x, self.mask)
        if not self.is_last:
            return x
        assert targets is not None
        logits = self.head(copy_to_group(self.norm(x), self.vocabulary_group))
        return cross_entropy_sum(logits, targets, self.vocabulary_group)
