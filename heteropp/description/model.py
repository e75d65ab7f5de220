"""The model file: the shape of a Llama-family transformer with grouped-query attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from heteropp.description.files import FileError, read_toml
from heteropp.description.hugging_face import RopeScaling, read_config
from heteropp.description.presets import model_path


@dataclass(frozen=True, kw_only=True)
class Model:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    sequence_length: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    # those of 16 bits keep a master copy, and sum gradients, in float32; float16 scales its loss
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    # fused: one kernel, which keeps no weights between pairs of tokens (FlashAttention)
    attention: Literal["explicit", "fused"] = "explicit"
    tied_embeddings: bool = False  # the head's weight is the embedding's
    rope_scaling: RopeScaling | None = None
    dropout: float = 0.0  # of what embedding, attention and MLP add to the residual stream

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def dtype_bytes(self) -> int:
        return {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def wide_dtype(self) -> str:
        """The dtype of gradients and of the optimizer's state: float32 for a 16-bit model."""
        return "float32" if self.dtype_bytes == 2 else self.dtype


LARGEST = 2**24  # of any size; what is larger is a slip, and would keep a planner busy for ever


class ModelError(ValueError):
    """A model that cannot be; the message is one sentence."""


def validate(model: Model) -> None:
    """Raises ModelError, one sentence."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "sequence_length")
    for name in sizes:
        if not 1 <= getattr(model, name) <= LARGEST:
            raise ModelError(f"{name} is {getattr(model, name)}; expected 1 to {LARGEST}")
    if model.hidden % (2 * model.heads):
        raise ModelError(
            f"hidden {model.hidden} is not an even multiple of heads {model.heads}; "
            "rotary embedding turns pairs within a head"
        )
    if model.heads % model.kv_heads:
        raise ModelError(f"heads {model.heads} is not a multiple of kv_heads {model.kv_heads}")
    if not 0 < model.rope_theta < math.inf or not 0 < model.norm_eps < 1:
        raise ModelError("rope_theta must be positive and finite, and norm_eps between 0 and 1")
    if not 0 <= model.dropout < 1:
        raise ModelError(f"dropout is {model.dropout}; expected at least 0 and below 1")
    if model.rope_scaling is not None:
        _validate_scaling(model.rope_scaling)


def _validate_scaling(scaling: RopeScaling) -> None:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 1 <= scaling.factor < math.inf:
        raise ModelError(f"rope_scaling.factor is {scaling.factor}; expected at least 1")
    if not 0 < low < high < math.inf:
        raise ModelError(
            f"rope_scaling has low_freq_factor {low} and high_freq_factor {high}; "
            "expected positive numbers, the second the larger"
        )
    if not 1 <= scaling.original_max_position_embeddings <= LARGEST:
        raise ModelError(
            "rope_scaling.original_max_position_embeddings is "
            f"{scaling.original_max_position_embeddings}; expected 1 to {LARGEST}"
        )


def read_model(path: str | Path, sequence_length: int | None = None) -> Model:
    """Reads a model file, a Hugging Face folder or its config.json, or a preset by name.

    A sequence length, in tokens, is taken in place of the file's. Raises FileError.
    """
    path = model_path(path)
    if path.is_dir():
        path /= "config.json"
    model = Model(**read_config(path)) if path.suffix == ".json" else read_toml(path, Model)
    if sequence_length is not None:
        model = replace(model, sequence_length=sequence_length)
    try:
        validate(model)
    except ModelError as error:
        raise FileError(f"{path}: {error}") from None
    return model
