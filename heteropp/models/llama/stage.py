"""One stage of a Llama-family transformer: RMSNorm, rotary grouped-query attention, SwiGLU.

Activations are [rows, hidden], rows = sequences x sequence length, or this rank's part of them with
sequence parallelism. Parameters have global names ("layers.17.attention.query.weight") in every
stage, and initial values that depend on the seed, the name and the full shape alone, never on the
layout.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heteropp.description.boxes import Box
from heteropp.description.model import Model
from heteropp.models.llama.attention import mix, mix_again
from heteropp.models.llama.dropout import Dropout, row_and_column_hashes
from heteropp.models.llama.parameters import Parameter, global_name, model_parameters
from heteropp.models.llama.rotary import rotary_frequencies
from heteropp.models.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelGroup,
    VocabularyParallelEmbedding,
    copy_to_group,
    cross_entropy_sum,
)


def initial_value(model: Model, parameter: Parameter, seed: int) -> Tensor:
    """The whole float32 tensor, on the host."""
    if parameter.name.endswith("norm.weight"):
        return torch.ones(parameter.shape)
    digest = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    std = 0.02
    if parameter.name.endswith(("attention.output.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * model.layers)  # they add to the residual stream, twice a layer
    return torch.randn(parameter.shape, generator=generator) * std


class RMSNorm(nn.Module):
    def __init__(self, model: Model, **kind: Any) -> None:
        super().__init__()
        self.epsilon = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.hidden, **kind))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal grouped-query attention over this rank's share of the heads."""

    def __init__(
        self, model: Model, group: TensorParallelGroup, selective_recompute: bool, **kind: Any
    ) -> None:
        super().__init__()
        self.mix = mix_again if selective_recompute else mix
        self.heads = model.heads // group.size
        self.kv_heads = model.kv_heads // group.size
        self.head_size = model.head_size
        self.length = model.sequence_length
        self.fused = model.attention == "fused"
        kv = model.kv_heads * model.head_size
        self.query = ColumnParallelLinear(model.hidden, model.hidden, group, **kind)
        self.key = ColumnParallelLinear(model.hidden, kv, group, **kind)
        self.value = ColumnParallelLinear(model.hidden, kv, group, **kind)
        self.output = RowParallelLinear(model.hidden, model.hidden, group, **kind)

    def forward(self, x: Tensor, tables: SharedConstants, mask: Tensor) -> Tensor:
        query = tables.rotate(self.query(x).view(-1, self.length, self.heads, self.head_size))
        key = tables.rotate(self.key(x).view(-1, self.length, self.kv_heads, self.head_size))
        value = self.value(x).view(-1, self.length, self.kv_heads, self.head_size)
        if self.fused:
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            return self.output(mixed.transpose(1, 2).reshape(x.shape[0], -1))
        pairs = query.shape[0] * self.kv_heads  # (sequence, kv head) pairs
        # the query heads that share a kv head stand below each other in one matrix
        query = query.transpose(1, 2).reshape(pairs, -1, self.head_size)
        key = key.permute(0, 2, 3, 1).reshape(pairs, self.head_size, self.length)
        value = value.transpose(1, 2).reshape(pairs, self.length, self.head_size)
        mixed = self.mix(query, key, value, mask)
        mixed = mixed.view(-1, self.heads, self.length, self.head_size)
        return self.output(mixed.transpose(1, 2).reshape(x.shape[0], -1))


class MLP(nn.Module):
    def __init__(self, model: Model, group: TensorParallelGroup, **kind: Any) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(model.hidden, model.intermediate, group, **kind)
        self.up = ColumnParallelLinear(model.hidden, model.intermediate, group, **kind)
        self.down = RowParallelLinear(model.intermediate, model.hidden, group, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(
        self,
        model: Model,
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
        self, x: Tensor, tables: SharedConstants, mask: Tensor, hashes: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        mixed = self.attention(copy_to_group(self.attention_norm(x), self.group), tables, mask)
        x = x + self.attention_dropout(mixed, hashes)
        return x + self.mlp_dropout(self.mlp(copy_to_group(self.mlp_norm(x), self.group)), hashes)


class SharedConstants(nn.Module):
    """Constants that all layers share: the causal mask and the angles of rotary embedding."""

    mask: Tensor  # [1, 1, length, length]
    cosine: Tensor  # [length, 1, head size]
    sine: Tensor  # the same, its first half negated

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        positions = torch.arange(model.sequence_length).double()
        angle = torch.outer(positions, rotary_frequencies(model)).unsqueeze(1)
        mask = torch.full((model.sequence_length, model.sequence_length), -math.inf).triu(1)
        for name, table in (
            ("mask", mask.view(1, 1, *mask.shape)),
            ("cosine", torch.cat((angle.cos(), angle.cos()), -1)),
            ("sine", torch.cat((-angle.sin(), angle.sin()), -1)),
        ):
            self.register_buffer(name, table.to(dtype).to(device), persistent=False)

    def mask_between(self, documents: Tensor) -> Tensor:
        """Returns a mask that also keeps documents apart, [sequences, 1, length, length].

        documents: each row's document, [rows]. Positions need no change between documents, as only
        the distance of two tokens counts.
        """
        documents = documents.view(-1, 1, self.mask.shape[-1])
        apart = documents.unsqueeze(-1) != documents.unsqueeze(-2)
        return self.mask.masked_fill(apart, -math.inf)

    def rotate(self, x: Tensor) -> Tensor:
        """Turns (x[i], x[i + half]) of each head by the angle of its position; three operators."""
        return torch.addcmul(x * self.cosine, x.roll(x.shape[-1] // 2, -1), self.sine)


class StageModule(nn.Module):
    """Layers [first, last) as one rank of a tensor-parallel group holds them.

    The stage with layer 0 embeds; the stage with the last layer ends in the summed loss.
    Parameters are uninitialised until `initialise`.
    """

    def __init__(
        self,
        model: Model,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        selective_recompute: bool = False,
        seed: int = 0,  # of dropout
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}

        def dropout(place: str) -> Dropout:
            return Dropout(model.dropout, seed, place)

        self.model, self.group, self.layer_range = model, group, layers
        self.is_first, self.is_last = layers[0] == 0, layers[1] == model.layers
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
        self.tables = SharedConstants(model, **kind)

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Tokens [rows] or activations [rows, hidden] to activations, or to the loss.

        The loss is the cross entropy summed over the rows, a scalar; it needs targets [rows].
        Dropout asks for the first row's number in the whole run, and is for training alone.
        Rows attend to those of their own document, or of their whole sequence without `documents`,
        [rows]: numbers that are unlike within a sequence.
        """
        mask = self.tables.mask if documents is None else self.tables.mask_between(documents)
        if self.is_first:
            x = self.embedding(x)
        hashes = None
        if self.model.dropout and self.training:
            own = self.group.index * len(x) if self.group.sequence_parallel else 0
            hashes = row_and_column_hashes(first_row + own, x.shape, x.device)
        if self.is_first:
            x = self.embedding_dropout(x, hashes)
        for layer in self.layers.values():
            x = layer(x, self.tables, mask, hashes)
        if not self.is_last:
            return x
        assert targets is not None
        logits = self.head(copy_to_group(self.norm(x), self.group))
        return cross_entropy_sum(logits, targets, self.group)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fills the parameters with this rank's slices of the initial values."""
        held = dict(self.named_parameters())
        for parameter in model_parameters(self.model, self.layer_range):
            box = parameter.box(self.group.size, self.group.index)
            whole = Box(tuple((0, size) for size in parameter.shape))
            named = replace(parameter, name=global_name(self.model, parameter.name))
            value = initial_value(self.model, named, seed)[box.within(whole)]
            target = held[parameter.name]
            target.copy_(value.to(target.dtype).contiguous())
