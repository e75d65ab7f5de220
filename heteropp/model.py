"""The model file: the shape of a Llama-family transformer with grouped-query attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from heteropp.files import FileError, read_toml
from heteropp.hugging_face import read_config
from heteropp.presets import model_path


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
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    # fused: one kernel, which keeps no weights between pairs of tokens (FlashAttention)
    attention: Literal["explicit", "fused"] = "explicit"

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def dtype_bytes(self) -> int:
        return {"float32": 4, "float64": 8, "bfloat16": 2}[self.dtype]


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


def read_model(path: str | Path) -> Model:
    """Reads a model file, a Hugging Face config.json, or a preset by name. Raises FileError."""
    path = model_path(path)
    model = Model(**read_config(path)) if path.suffix == ".json" else read_toml(path, Model)
    try:
        validate(model)
    except ModelError as error:
        raise FileError(f"{path}: {error}") from None
    return model
