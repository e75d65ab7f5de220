"""Causal attention for transformers' modules, without a mask made anew in every forward.

It is registered with transformers as an attention function that needs no mask: what a family's
loop would make from position ids it then leaves out, and with it a read back from the chip.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heteropp.models.attention import mix
from heteropp.models.documents import Documents
from heteropp.models.fused_attention import attend
from heteropp.models.parallel.context_parallel import ContextParallelGroup
from heteropp.models.parallel.token_context import TokenContext, own_part
from heteropp.models.parallel.token_slices import TokenSlice

NAME = "heteropp"
NEED_MASK = {  # which add to it before they attend, or attend by themselves
    *("axk2", "deepseek_v32", "doge", "dots3_note_text", "glm_moe_dsa", "gpt_neox_japanese"),
}
CHUNKED = "chunked_attention"


class Masks(nn.Module):
    """What is added to scores, a table for each window that a stage's layers look through.

    A pass that runs a slice sees the slice's part of each.
    """

    def __init__(
        self,
        windows: set[int | None],
        length: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        fused: bool = False,
        context: ContextParallelGroup | None = None,
    ) -> None:
        """windows: how many rows one attends to at most, itself included; None: all before it.

        context: the ranks over which sequences of `length` are cut. Tables are then of this one's
        tokens, [first, last), and of all that these see.

        fused: whether attention that can be is one kernel, which needs no table: one is then made
        only for attention that has more to it (`attention`), when it asks.
        """
        super().__init__()
        self.first, self.length = own_part(context, length)
        self.ranks, self.device, self.dtype, self.fused = context, device, dtype, fused
        self.begin(None, None)
        for window in windows:
            if not fused:
                self._add(self._name(window))

    def of(self, window: int | None) -> Tensor:
        """Returns [1 or sequences, 1, tokens, last]."""
        name = self._name(window)
        if not hasattr(self, name):
            self._add(name)
        if name not in self.of_pass:
            first, last = self.tokens
            table: Tensor = getattr(self, name)
            table = table[..., first - self.first : last - self.first, :last]
            if self.documents is not None:
                documents = self.documents.of_rows.view(-1, 1, last)
                unlike = documents[..., first:].unsqueeze(-1) != documents.unsqueeze(-2)
                table = table.masked_fill(unlike, -math.inf)
            self.of_pass[name] = table
        return self.of_pass[name]

    def of_chunks(self, size: int) -> Tensor | None:
        """Returns what keeps chunks of rows apart, [1, 1, length, length]; None: nothing does."""
        if size >= self.length:
            return None
        name = f"chunk_{size}"
        if not hasattr(self, name):
            self._add(name)
        table: Tensor = getattr(self, name)
        return table

    def begin(self, documents: Documents | None, part: TokenSlice | None) -> None:
        """Begins a pass over a slice; None: over all tokens of this rank.

        documents: to whose own rows each row attends; None: a sequence is one.
        """
        self.documents = documents
        self.context: TokenContext | None = part or self.ranks
        self.tokens = (self.first, self.length) if part is None else own_part(part, self.length)
        self.of_pass: dict[str, Tensor] = {}  # tables of these tokens, by name

    def _name(self, window: int | None) -> str:
        return f"window_{self.length if window is None else min(window, self.length)}"

    def _add(self, name: str) -> None:
        shape = 1, 1, self.length - self.first, self.length
        if torch.device(self.device).type == "meta":
            table = torch.empty(shape, dtype=self.dtype, device="meta")
            self.register_buffer(name, table, persistent=False)
            return
        kind, size = name.split("_")
        seen = torch.arange(self.length, device="cpu")
        rows = seen[self.first :].unsqueeze(1)
        apart = rows - seen
        if kind == "chunk":
            allowed = (apart >= 0) & (rows // int(size) == seen // int(size))
        else:
            allowed = (apart >= 0) & (apart < int(size))
        table = torch.zeros(apart.shape, dtype=self.dtype, device="cpu")
        table = table.masked_fill_(~allowed, -math.inf).view(shape)
        self.register_buffer(name, table.to(self.device), persistent=False)


class _Running(threading.local):
    masks: Masks | None = None  # of the stage whose forward is running


_running = _Running()


@contextmanager
def masked_by(masks: Masks) -> Iterator[None]:
    """Attention inside looks through these masks."""
    _running.masks = masks
    try:
        yield
    finally:
        _running.masks = None


def given_mask(config: Any, masks: Masks) -> Any:
    """Returns what a family's loop is given as its mask; None: it makes none and needs none."""
    if config.model_type in NEED_MASK:
        return masks.of(None)
    if CHUNKED in (getattr(config, "layer_types", None) or ()):
        return {"full_attention": None, CHUNKED: masks.of_chunks(config.attention_chunk_size)}
    return None


def windows_of(layer: nn.Module) -> Iterator[int | None]:
    """Yields the window of every attention in a layer."""
    for module in layer.modules():
        if hasattr(module, "is_causal"):  # some attend through the window of all layers alike
            of_all = getattr(getattr(module, "config", None), "sliding_window", None)
            yield getattr(module, "sliding_window", of_all)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends from [sequences, heads, length, size] to keys and values of as many or fewer heads.

    softcap: a bound of the scores, which they near as a hyperbolic tangent does. s_aux: a sink's
    logit for each head, which takes its part of the softmax. indices: [sequences, length, kept],
    the keys that a row attends to at most. position_bias: what scores have beside. Returns
    [sequences, length, heads, size of values].
    """
    assert _running.masks is not None, "a stage's forward has set them"
    context = _running.masks.context
    is_plain = s_aux is None and position_bias is None and indices is None
    if _running.masks.fused and is_plain and attention_mask is None:
        rows = (each.transpose(1, 2) for each in (query, key, value))
        apart = _running.masks.documents
        mixed = attend(
            *rows, window=sliding_window, documents=apart, scale=scaling, soft_cap=softcap,
            context=context, place=module,
        )  # fmt: skip
        return mixed.contiguous(), None
    if context is not None:
        key, value = context.keys_and_values(key.transpose(1, 2), value.transpose(1, 2), module)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    mask = _running.masks.of(sliding_window)
    if attention_mask is not None and attention_mask is not _running.masks.of(None):
        mask = mask + attention_mask  # a family's own, beside its window
    if position_bias is not None:
        mask = mask + position_bias
    if indices is not None:
        chosen = mask.new_full((*indices.shape[:2], mask.shape[-1]), -math.inf)
        mask = mask + chosen.scatter(-1, indices.long(), 0.0).unsqueeze(1)
    sequences, heads, length, size = query.shape
    pairs, seen = sequences * key.shape[1], key.shape[2]  # (sequence, kv head) pairs
    # the query heads that share a kv head stand below each other in one matrix
    query = query.reshape(pairs, -1, size)
    key = key.transpose(2, 3).reshape(pairs, size, -1)
    value = value.reshape(pairs, seen, -1)
    if softcap is None and s_aux is None:
        mixed = mix(query, key, value, mask, scaling)
    else:
        scores = (query @ key).view(sequences, heads, length, seen)
        scores = scores * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = _softmax(scores + mask, s_aux).view(pairs, -1, seen)
        mixed = weights @ value
    return mixed.view(sequences, heads, length, -1).transpose(1, 2).contiguous(), None


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
