"""The parameters of a whole model: names, shapes, and how tensor parallelism cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from heteropp.description.boxes import Box, split
from heteropp.description.model import Model


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    split_dimension: int | None  # which tensor parallelism cuts; None: every rank holds a copy

    def box(self, tp: int, index: int) -> Box:
        """The slice that one rank of a tensor-parallel group holds."""
        whole = Box(tuple((0, size) for size in self.shape))
        if self.split_dimension is None:
            return whole
        return split(whole, self.split_dimension, tp, index)


def model_parameters(model: Model, layers: tuple[int, int] | None = None) -> list[Parameter]:
    """The parameters of layers [first, last), or of the whole model, in global order.

    A tied head is one with the embedding; without it, it is a parameter of its own.
    """
    first, last = layers or (0, model.layers)
    hidden, kv = model.hidden, model.kv_heads * model.head_size
    result = []
    if first == 0:
        result.append(Parameter("embedding.weight", (model.vocab, hidden), 0))
    for layer in range(first, last):
        for name, shape, dimension in (
            ("attention_norm", (hidden,), None),
            ("attention.query", (hidden, hidden), 0),
            ("attention.key", (kv, hidden), 0),
            ("attention.value", (kv, hidden), 0),
            ("attention.output", (hidden, hidden), 1),
            ("mlp_norm", (hidden,), None),
            ("mlp.gate", (model.intermediate, hidden), 0),
            ("mlp.up", (model.intermediate, hidden), 0),
            ("mlp.down", (hidden, model.intermediate), 1),
        ):
            result.append(Parameter(f"layers.{layer}.{name}.weight", shape, dimension))
    if last == model.layers:
        result.append(Parameter("norm.weight", (hidden,), None))
        if not (model.tied_embeddings and first == 0):
            result.append(Parameter("head.weight", (model.vocab, hidden), 0))
    return result


def global_name(model: Model, name: str) -> str:
    """A parameter's name in the whole model, where a tied head is the embedding."""
    return "embedding.weight" if model.tied_embeddings and name == "head.weight" else name
