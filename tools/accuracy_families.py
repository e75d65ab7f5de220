"""Small models of families that run by transformers' modules, for tools/accuracy to train."""

from __future__ import annotations

from typing import Any

from heteropp.models.spec import ModelSpec

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _SIZES,
    "gemma2": {**_SIZES, "sliding_window": 32},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "num_experts": 4},
    "deepseek_v3": {
        **_SIZES,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "head_dim": 8,  # of the rotary key
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def small_model(family: str) -> ModelSpec:
    """Returns the spec of a family's small model. Raises ImportError without transformers."""
    from transformers import CONFIG_MAPPING

    from heteropp.models.hugging_face.reading import read

    config = CONFIG_MAPPING[family](**FAMILIES[family]).to_dict()
    length = _SIZES["max_position_embeddings"]
    return read({**config, "model_type": family}, family, sequence_length=length, dtype="float32")
