"""What a user writes to have a model of their own planned and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from heteropp.models.spec import Dtype

if TYPE_CHECKING:
    from torch import Tensor, nn

# of a Linear layer, column cuts the outputs, row the inputs, and packed pieces of the outputs each
# by itself (their number, or their sizes); vocabulary cuts an Embedding. Every rank has a copy of
# what is replicated; partial: and sees only its part of what the copy acts on
Cut = (
    Literal["column", "row", "vocabulary", "replicated", "partial"]
    | tuple[Literal["packed"], int | tuple[int, ...]]
)
Make = Callable[[], "nn.Module"]  # makes a part, with its initial values


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """A model of plain modules: an embedding, blocks in order, and a head.

    embedding: takes tokens, [sequences, length] int64, to activations, [sequences, length, hidden].
    blocks: by kind; each takes activations to activations of the same shape. Blocks of one kind
    cost the same. order: the kinds, from the first block to the last.
    head: takes activations to logits, [sequences, length, vocab].
    cut: how tensor parallelism cuts the weights, by the names of layers or parameters after that of
    their part, such as "wide.attention.query" or "*.up" (of several patterns that fit, the first
    counts); None: it does not, and tp is 1. Code behind a cut layer must take the sizes of what it
    computes with from the tensors, as a rank has only its part of the heads.
    tp_divides: other numbers, by name, that tp must divide, such as the heads.
    tied: parameters of the head that are the embedding's.
    no_weight_decay: patterns of names of matrices that have none, such as "embedding.positions";
    norms and biases have none anyway.
    loss: takes logits and targets, [rows, vocab] and [rows], to the loss summed over the rows, of
    which those with a target below 0 take no part; None: the cross entropy.
    """

    name: str
    sequence_length: int  # tokens
    embedding: Make
    blocks: Mapping[str, Make]
    order: Sequence[str]
    head: Make
    dtype: Dtype = "float32"
    cut: Mapping[str, Cut] | None = None
    tp_divides: Mapping[str, int] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    no_weight_decay: Sequence[str] = ()
    loss: Callable[[Tensor, Tensor], Tensor] | None = None

    def makes(self) -> dict[str, Make]:
        """Returns what makes each part, by the part's name: a block's is its kind."""
        return {"embedding": self.embedding, **self.blocks, "head": self.head}
