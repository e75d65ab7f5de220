"""GPT-2's Hugging Face folders.

Their matrices are [in, out], and queries, keys and values stand side by side in one. Dropout of
config.json is not taken over: training goes without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from heteropp.models.hugging_face_format import HuggingFaceTable, HuggingFaceTensor
from heteropp.models.spec import ModelError, Parameter

if TYPE_CHECKING:
    from heteropp.models.gpt2.model import GPT2Model

# what our model has no form of, with the values under which a config does without it
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_PREFIX = "transformer."  # which folders of the model without its head leave out
# ours to theirs; a layer's stand under "layers.17." and "transformer.h.17."
_NAMES = {
    "embedding": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_PACKED = ("attention.query", "attention.key", "attention.value")  # of attn.c_attn, in order


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    n_layer: int
    n_embd: int
    n_head: int
    vocab_size: int
    n_positions: int
    n_inner: int | None = None  # absent: four times n_embd
    layer_norm_epsilon: float = 1e-5
    torch_dtype: str | None = None
    dtype: str | None = None  # newer for torch_dtype
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    quantization_config: Any = None


class GPT2Format(HuggingFaceTable):
    model_types = ("gpt2",)
    config = GPT2Config

    def fields(self, config: GPT2Config) -> dict[str, Any]:
        for key, values in _MUST_BE.items():
            if getattr(config, key) not in values:
                raise ModelError(
                    f"{key} is {getattr(config, key)!r}; expected {values[0]!r}, the only form "
                    "our model has"
                )
        dtype = config.dtype or config.torch_dtype or "float32"
        if dtype not in _DTYPES:
            raise ModelError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
        return {
            "layers": config.n_layer,
            "hidden": config.n_embd,
            "heads": config.n_head,
            "intermediate": config.n_inner or 4 * config.n_embd,
            "vocab": config.vocab_size,
            "positions": config.n_positions,
            "sequence_length": config.n_positions,
            "norm_eps": config.layer_norm_epsilon,
            "dtype": dtype,
            "tied_embeddings": config.tie_word_embeddings,
        }

    def config_of(self, model: GPT2Model) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.intermediate,
            "vocab_size": model.vocab,
            "n_positions": model.positions,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": model.tied_embeddings,
            "torch_dtype": model.dtype,
        }

    def stored(self, model: GPT2Model, parameter: Parameter) -> HuggingFaceTensor:
        name, shape = parameter.name, parameter.shape
        if name == "head.weight":
            return HuggingFaceTensor("lm_head.weight", shape)
        layer, first_row = "", 0
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            layer = f"h.{number}."
        part, _, leaf = name.rpartition(".")
        if part in _PACKED:
            first_row = _PACKED.index(part) * model.hidden
            theirs, shape = "attn.c_attn", (3 * shape[0], *shape[1:])
        else:
            theirs = _NAMES[part]
        transposed = bool(layer) and len(shape) == 2
        own_name = f"{layer}{theirs}.{leaf}"
        stored_shape = shape[::-1] if transposed else shape
        return HuggingFaceTensor(
            f"{_PREFIX}{own_name}", stored_shape, transposed, first_row, other_name=own_name
        )
