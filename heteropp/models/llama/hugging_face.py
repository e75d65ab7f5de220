"""The Llama family's Hugging Face folders, as far as our model goes.

Their rotary embedding turns the same pairs as ours, so that only names differ.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ConfigDict, model_validator

from heteropp.models.hugging_face_format import HuggingFaceTable, HuggingFaceTensor
from heteropp.models.llama.model import LlamaModel, RopeScaling
from heteropp.models.spec import ModelError, ModelSpec, NoFormError, Parameter

# what our model has no form of, with the value under which a config does without it
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "quantization_config": (None,),
}
# what transformers takes for mistral where a config.json leaves it out; null says otherwise
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_DTYPES = ("float32", "float64", "bfloat16", "float16")
# ours to theirs; a layer's stand under "layers.17." and "model.layers.17."
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class _Rope:
    """`rope_scaling`, and newer `rope_parameters`, which also says the angles' base."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    rope_type: str | None = None
    type: str | None = None  # older for rope_type
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    model_type: str
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    num_key_value_heads: int | None = None  # null: as many as attention heads
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    torch_dtype: str | None = None
    dtype: str | None = None  # newer for torch_dtype
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    sliding_window: Any = None
    quantization_config: Any = None

    @model_validator(mode="before")
    @classmethod
    def with_defaults_of_mistral(cls, values: Any) -> Any:
        """Returns what a config.json says, with what it leaves out where that is not Llama's."""
        if isinstance(values, dict) and values.get("model_type") == "mistral":
            return {**_MISTRAL, **values}
        return values


class LlamaFormat(HuggingFaceTable):
    model_types = ("llama", "mistral")
    config = LlamaConfig

    def fields(self, config: LlamaConfig) -> dict[str, Any]:
        for key, values in _MUST_BE.items():
            if getattr(config, key) not in values:
                raise NoFormError(
                    f"{key} is {getattr(config, key)!r}; expected {values[0]!r}, the only form "
                    "our model has"
                )
        sizes = {
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "heads": "num_attention_heads",
            "intermediate": "intermediate_size",
            "vocab": "vocab_size",
            "sequence_length": "max_position_embeddings",
        }
        for key in sizes.values():
            if getattr(config, key) is None:
                raise ModelError(f"{key}: missing")
        fields = {name: getattr(config, key) for name, key in sizes.items()}
        _check_heads(config)
        dtype = config.dtype or config.torch_dtype or "float32"
        if dtype not in _DTYPES:
            raise ModelError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
        theta, scaling = _rope(config)
        return {
            **fields,
            "kv_heads": config.num_key_value_heads or config.num_attention_heads,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "norm_eps": config.rms_norm_eps,
            "dtype": dtype,
            "tied_embeddings": config.tie_word_embeddings,
        }

    def config_of(self, model: LlamaModel) -> dict[str, Any]:
        scaling = model.rope_scaling and {"rope_type": "llama3", **asdict(model.rope_scaling)}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_size,
            "intermediate_size": model.intermediate,
            "vocab_size": model.vocab,
            "max_position_embeddings": model.sequence_length,
            "rope_theta": model.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": model.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": model.tied_embeddings,
            "torch_dtype": model.dtype,
        }

    def stored(self, model: ModelSpec, parameter: Parameter) -> HuggingFaceTensor:
        name = parameter.name.removesuffix(".weight")
        if name in _NAMES:
            return HuggingFaceTensor(f"{_NAMES[name]}.weight", parameter.shape)
        _, layer, part = name.split(".", 2)
        return HuggingFaceTensor(f"model.layers.{layer}.{_NAMES[part]}.weight", parameter.shape)


def _check_heads(config: LlamaConfig) -> None:
    heads, hidden, size = config.num_attention_heads, config.hidden_size, config.head_dim
    assert heads is not None and hidden is not None
    if size is not None and size * heads != hidden:
        raise NoFormError(
            f"head_dim is {size}; expected hidden_size / num_attention_heads, {hidden} / {heads}"
        )


def _rope(config: LlamaConfig) -> tuple[float, RopeScaling | None]:
    """Returns the base of the rotary angles, and their scaling."""
    key = "rope_parameters" if config.rope_parameters else "rope_scaling"
    rope = config.rope_parameters or config.rope_scaling
    if rope is None:
        return config.rope_theta, None
    kind = rope.rope_type or rope.type
    if kind not in ("default", "llama3"):
        raise NoFormError(f"{key}.rope_type is {kind!r}; expected 'default' or 'llama3'")
    if rope.partial_rotary_factor != 1:
        raise NoFormError(
            f"{key}.partial_rotary_factor is {rope.partial_rotary_factor}; expected 1"
        )
    theta = config.rope_theta if rope.rope_theta is None else rope.rope_theta
    if kind == "default":
        return theta, None
    values = {name: getattr(rope, name) for name in RopeScaling.__dataclass_fields__}
    for name, value in values.items():
        if value is None:
            raise ModelError(f"{key}.{name}: missing")
    return theta, RopeScaling(**values)
