"""One stage of a Llama-family transformer: RMSNorm, rotary grouped-query attention, SwiGLU.

Parameters have global names ("layers.17.attention.query.weight") in every stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heteropp.models.attention import mix, mix_again
from heteropp.models.documents import Documents
from heteropp.models.fused_attention import attend
from heteropp.models.llama.dropout import Dropout, row_and_column_hashes
from heteropp.models.llama.model import LlamaModel
from heteropp.models.llama.rotary import rotary_frequencies
from heteropp.models.parallel.context_parallel import ContextParallelGroup
from heteropp.models.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelGroup,
    VocabularyParallelEmbedding,
    copy_to_group,
    cross_entropy_sum,
)
from heteropp.models.parallel.token_context import TokenContext, own_part
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.stage_module import StageModule


@dataclass(frozen=True)
class PassTables:
    """What all layers of a pass share: its tokens [first, last), and all up to the last."""

    cosine: Tensor  # of the angles of rotary embedding, [tokens, 1, head size]
    sine: Tensor  # the same, its first half negated
    # which tokens one sees: a mask, [1 or sequences, 1, tokens, last], and to a fused kernel the
    # documents; None: it needs no telling
    seen: Tensor | Documents | None
    context: TokenContext | None  # where attention finds the tokens before; None: there are none

    @property
    def tokens(self) -> int:
        """The number of tokens of each sequence."""
        return len(self.cosine)

    def rotate(self, x: Tensor) -> Tensor:
        """Turns (x[i], x[i + half]) of each head by the angle of its position; three operators."""
        return torch.addcmul(x * self.cosine, x.roll(x.shape[-1] // 2, -1), self.sine)


class RMSNorm(nn.Module):
    def __init__(self, model: LlamaModel, **kind: Any) -> None:
        super().__init__()
        self.epsilon = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.hidden, **kind))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal grouped-query attention over this rank's share of the heads."""

    def __init__(
        self,
        model: LlamaModel,
        group: TensorParallelGroup,
        selective_recompute: bool,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.mix = mix_again if selective_recompute else mix
        self.heads = model.heads // group.size
        self.kv_heads = model.kv_heads // group.size
        self.head_size = model.head_size
        kv = model.kv_heads * model.head_size
        self.query = ColumnParallelLinear(model.hidden, model.hidden, group, **kind)
        self.key = ColumnParallelLinear(model.hidden, kv, group, **kind)
        self.value = ColumnParallelLinear(model.hidden, kv, group, **kind)
        self.output = RowParallelLinear(model.hidden, model.hidden, group, **kind)

    def forward(self, x: Tensor, tables: PassTables) -> Tensor:
        tokens, seen = tables.tokens, tables.seen
        query = tables.rotate(self.query(x).view(-1, tokens, self.heads, self.head_size))
        key = tables.rotate(self.key(x).view(-1, tokens, self.kv_heads, self.head_size))
        value = self.value(x).view(-1, tokens, self.kv_heads, self.head_size)
        if not isinstance(seen, Tensor):
            mixed = attend(query, key, value, documents=seen, context=tables.context, place=self)
            return self.output(mixed.reshape(x.shape[0], -1))
        if tables.context is not None:
            key, value = tables.context.keys_and_values(key, value, self)
        length = seen.shape[-1]
        pairs = query.shape[0] * self.kv_heads  # (sequence, kv head) pairs
        # the query heads that share a kv head stand below each other in one matrix
        query = query.transpose(1, 2).reshape(pairs, -1, self.head_size)
        key = key.permute(0, 2, 3, 1).reshape(pairs, self.head_size, length)
        value = value.transpose(1, 2).reshape(pairs, length, self.head_size)
        mixed = self.mix(query, key, value, seen)
        mixed = mixed.view(-1, self.heads, tokens, self.head_size)
        return self.output(mixed.transpose(1, 2).reshape(x.shape[0], -1))


class MLP(nn.Module):
    def __init__(self, model: LlamaModel, group: TensorParallelGroup, **kind: Any) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(model.hidden, model.intermediate, group, **kind)
        self.up = ColumnParallelLinear(model.hidden, model.intermediate, group, **kind)
        self.down = RowParallelLinear(model.intermediate, model.hidden, group, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(
        self,
        model: LlamaModel,
        group: TensorParallelGroup,
        selective_recompute: bool,
        dropouts: tuple[Dropout, Dropout],
        **kind: Any,
    ) -> None:
        super().__init__()
        self.group = group
        self.attention_norm = RMSNorm(model, **kind)
        self.attention = Attention(model, group, selective_recompute, **kind)
        self.mlp_norm = RMSNorm(model, **kind)
        self.mlp = MLP(model, group, **kind)
        self.attention_dropout, self.mlp_dropout = dropouts

    def forward(
        self,
        x: Tensor,
        tables: PassTables,
        hashes: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        mixed = self.attention(copy_to_group(self.attention_norm(x), self.group), tables)
        x = x + self.attention_dropout(mixed, hashes)
        return x + self.mlp_dropout(self.mlp(copy_to_group(self.mlp_norm(x), self.group)), hashes)


class SharedConstants(nn.Module):
    """Constants that all passes share: the causal mask and the angles of rotary embedding.

    They are of the tokens that a rank takes of each sequence, and the mask is of all up to its
    last; a slice takes its own of them.
    """

    mask: Tensor | None  # as in PassTables; a fused kernel needs none
    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        model: LlamaModel,
        device: torch.device,
        dtype: torch.dtype,
        context: ContextParallelGroup | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.first, last = own_part(context, model.sequence_length)
        positions = torch.arange(self.first, last).double()
        angle = torch.outer(positions, rotary_frequencies(model)).unsqueeze(1)
        tables = {
            "cosine": torch.cat((angle.cos(), angle.cos()), -1),
            "sine": torch.cat((-angle.sin(), angle.sin()), -1),
        }
        self.register_buffer("mask", None, persistent=False)
        if model.attention == "explicit":
            size = 1, 1, last - self.first, last
            tables["mask"] = torch.full(size, -math.inf).triu(1 + self.first)
        for name, table in tables.items():
            self.register_buffer(name, table.to(dtype).to(device), persistent=False)

    def of(self, part: TokenSlice | None, documents: Documents | None) -> PassTables:
        """Returns the tables of a slice; None: of all the rank's tokens.

        documents: None: there is one in a sequence. Positions need no change between documents, as
        only the distance of two tokens counts.
        """
        cosine, sine, mask, first = self.cosine, self.sine, self.mask, self.first
        if part is not None:
            first, last = part.parts[part.index]
            cosine, sine = cosine[first:last], sine[first:last]
            mask = None if mask is None else mask[..., first:last, :last]
        if documents is not None and mask is not None:
            of_rows = documents.of_rows.view(-1, 1, mask.shape[-1])
            apart = of_rows[..., first:].unsqueeze(-1) != of_rows.unsqueeze(-2)
            mask = mask.masked_fill(apart, -math.inf)
        return PassTables(cosine, sine, documents if mask is None else mask, part or self.context)


class LlamaStage(StageModule):
    def __init__(
        self,
        model: LlamaModel,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        selective_recompute: bool,
        seed: int,  # of dropout
        context: ContextParallelGroup | None = None,
    ) -> None:
        super().__init__(model, layers, group)
        kind: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}

        def dropout(place: str) -> Dropout:
            return Dropout(model.dropout, seed, place)

        self.dropout = model.dropout
        if self.is_first:
            self.embedding = VocabularyParallelEmbedding(model.vocab, model.hidden, group, **kind)
            self.embedding_dropout = dropout("embedding")
        self.layers = nn.ModuleDict()
        for layer in range(*layers):
            dropouts = dropout(f"layers.{layer}.attention"), dropout(f"layers.{layer}.mlp")
            self.layers[str(layer)] = Layer(model, group, selective_recompute, dropouts, **kind)
        if self.is_last:
            self.norm = RMSNorm(model, **kind)
            self.head = ColumnParallelLinear(model.hidden, model.vocab, group, **kind)
        if self.is_first and self.is_last and model.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.tables = SharedConstants(model, **kind, context=context)

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Documents | None = None,
        part: TokenSlice | None = None,
    ) -> Tensor:
        tables = self.tables.of(part, documents)
        if self.is_first:
            x = self.embedding(x)
        hashes = None
        if self.dropout and self.training:
            tokens = own_part(tables.context, self.model.sequence_length)
            hashes = row_and_column_hashes(self._rows(first_row, tokens, x), x.shape[1])
        if self.is_first:
            x = self.embedding_dropout(x, hashes)
        for layer in self.layers.values():
            x = layer(x, tables, hashes)
        if not self.is_last:
            return x
        assert targets is not None
        logits = self.head(copy_to_group(self.norm(x), self.group))
        return cross_entropy_sum(logits, targets, self.group)

    def _rows(self, first_row: int, tokens: tuple[int, int], x: Tensor) -> Tensor:
        """Returns the numbers of activations' rows in the whole run, [rows].

        tokens: those [first, last) of each sequence that they are of.
        """
        (first, last), length = tokens, self.model.sequence_length
        own = self.group.index * len(x) if self.group.sequence_parallel else 0
        if last - first == length:
            return torch.arange(first_row + own, first_row + own + len(x), device=x.device)
        row = torch.arange(own, own + len(x), device=x.device)
        between = length - (last - first)  # rows of a sequence that are not here
        return row + row // (last - first) * between + (first_row + first)
