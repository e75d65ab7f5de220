"""A family's config made small: the same kinds of layers in the same order, of few features."""

from __future__ import annotations

import copy
import re
from typing import Any

from heteropp.models.hugging_face.config import Config
from heteropp.models.hugging_face.family import family, layer_numbers
from heteropp.models.hugging_face.reading import EXPERTS, EXPERTS_OF_TOKEN
from heteropp.models.hugging_face.remote_code import RemoteCode
from heteropp.models.spec import ModelError

LENGTH = 32  # tokens of a sequence, more than a small window
MOST_LAYERS = 16
_HEADS, _HEAD_SIZE = 4, 16
# by the names that configs have; where a family's own value is less, it stays
_SIZES = {
    "hidden_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 4 * LENGTH,
    "head_dim": _HEAD_SIZE,
    "global_head_dim": 2 * _HEAD_SIZE,
    "swa_head_dim": _HEAD_SIZE,
    "num_attention_heads": _HEADS,
    "swa_num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    # experts
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(EXPERTS_OF_TOKEN, 3),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    "zero_expert_num": 2,
    # latent attention
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    # sparse attention
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    # linear attention and state spaces
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 8,
    "num_heads": 8,
    "n_groups": 2,
    "mamba_n_heads": 8,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "block_size": 8,
}
# of which every rank of a group has some
_OF_RANKS = (
    *("hidden_size", "num_attention_heads", "swa_num_attention_heads", "num_key_value_heads"),
    *("swa_num_key_value_heads", "num_global_key_value_heads", "o_groups", "index_n_heads"),
    *("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "num_heads"),
    *("n_groups", "mamba_n_heads", "mamba_d_ssm"),
)
_INTERMEDIATE, _OF_EXPERTS = 96, 32


def small_config(values: dict[str, Any], tp: int = 1, code: RemoteCode | None = None) -> Config:
    """Returns a config of the same family with few layers of every kind that it has.

    tp: the degree of tensor parallelism that it should allow, if the family does; code: the
    folder's, as `fields_of` takes it. What the config says beside sizes, such as multipliers,
    biases and the kinds of norms, stays. Raises ModelError.
    """
    found = family(Config.of(values, code))
    layers = _enough_layers(found.kinds)
    known = found.config.to_dict()
    result: dict[str, Any] = {}
    for key, value in known.items():
        if isinstance(value, list) and len(value) == len(found.kinds):
            result[key] = value = value[:layers]
        elif key == "per_layer_config" and value:
            value = {i: each for i, each in value.items() if int(i) < layers}
        elif key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = None if value is None else 0
        result[key] = _smaller(key, value, max(1, tp // 2))
    numbers = layer_numbers(found, layers)
    result.update({key: value for key, value in numbers.items() if key in known})
    each = (result.get("per_layer_config") or {}).items()
    for i, own in each:
        was = {**known, **known["per_layer_config"][i]}
        own.update(_agreed({**result, **own}, was))
    result.update(_agreed(result, known))
    _shorten_rotary_tables(result)
    return Config.of({**result, "model_type": found.config.model_type}, code)


def _enough_layers(kinds: tuple[str, ...]) -> int:
    """Returns how many of the first layers have every kind, and one more.

    Kinds that differ in numbers alone, such as a scale that grows with depth, count as one.
    """
    names = [re.sub(r"_\d+$", "", kind) for kind in kinds]
    most = max(names.index(name) for name in set(names)) + 1
    layers = min(len(kinds), max(4, most + 1))
    if layers > MOST_LAYERS:
        raise ModelError(f"its first {MOST_LAYERS} layers do not have all kinds of layers")
    return layers


def _smaller(key: str, value: Any, times: int) -> Any:
    """Returns a value of a config made small; times: how often, of what ranks share."""
    if isinstance(value, list):
        return [_smaller(key, each, times) for each in value]
    if isinstance(value, dict) and not str(key).startswith("rope"):
        return {inner: _smaller(inner, each, times) for inner, each in value.items()}
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key in _SIZES:
        return min(value, _SIZES[key] * (times if key in _OF_RANKS else 1))
    if "intermediate" in str(key) or key in ("ffn_hidden_size", "expert_ffn_hidden_size"):
        is_of_experts = any(part in key for part in ("moe", "expert", "shared"))
        return min(value, _OF_EXPERTS if is_of_experts else _INTERMEDIATE)
    return value


def _agreed(values: dict[str, Any], was: dict[str, Any]) -> dict[str, Any]:
    """Returns sizes that follow from others; was: what the config said before it was made small."""
    result = {}
    if values.get("kv_lora_rank"):  # whose heads all have keys of their own
        if was.get("head_dim"):
            is_whole = was["head_dim"] == was["qk_nope_head_dim"] + was["qk_rope_head_dim"]
            nope = values["qk_nope_head_dim"] if is_whole else 0
            result["head_dim"] = nope + values["qk_rope_head_dim"]
        if "num_key_value_heads" in values:
            result["num_key_value_heads"] = values["num_attention_heads"]
    if values.get("mamba_d_head") and values.get("mamba_n_heads"):
        inner = values.get("mamba_d_ssm") or values["mamba_expand"] * values["hidden_size"]
        result["mamba_d_head"] = inner // values["mamba_n_heads"]
    return result


def _shorten_rotary_tables(values: dict[str, Any]) -> None:
    """Cuts the factors of single frequencies to the number of frequencies that are left."""
    size = values.get("head_dim") or values["hidden_size"] // values.get("num_attention_heads", 1)

    def visit(parameters: dict[str, Any]) -> None:
        used = int(size * (parameters.get("partial_rotary_factor") or 1.0)) // 2
        for key, value in parameters.items():
            if isinstance(value, dict):
                visit(value)
            elif key.endswith("_factor") and isinstance(value, list):
                parameters[key] = value[:used]
            elif key == "mrope_section" and isinstance(value, list):
                parameters[key] = [used - 2 * (used // 3), used // 3, used // 3]

    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), dict):
            values[key] = copy.deepcopy(values[key])
            visit(values[key])
