"""A config of every text decoder that transformers knows: its own default, as a release has it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from heteropp.models.hugging_face.family import NoStackError, dropouts

# Where a default cannot be built, or leaves out what the family is about: what config.json of a
# released model says. Sizes are left to the default, as the check makes them small.
_RELEASED: dict[str, dict[str, Any]] = {
    # CohereLabs/North-Micro: rotary layers in windows, and full ones without positions
    "cohere_compass_text": {
        "num_key_value_heads": 8,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 10,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
            "full_attention": None,
        },
        "logit_scale": 0.25,
    },
    # deepseek-ai/DeepSeek-V2
    "deepseek_v2": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "moe_intermediate_size": 1536,
    },
    # rednote-hilab/dots.llm1.base
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    # google/gemma-4-26B-A4B; those with embeddings of their own in every layer are refused
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    },
    # ibm-granite/granite-3.0-8b-base
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0,
    },
    # ibm-granite/granite-3.0-3b-a800m-base
    "granitemoe": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 6.0,
    },
    # tencent/Hunyuan-7B-Instruct
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    # tencent/Hunyuan-A13B-Instruct
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8, "num_experts": 64, "moe_topk": 8},
    # LiquidAI/LFM2-1.2B
    "lfm2": {
        "num_hidden_layers": 16,
        "layer_types": [
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
        ],
    },
    # LiquidAI/LFM2-8B-A1B
    "lfm2_moe": {
        "num_hidden_layers": 24,
        "layer_types": [
            "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
        ],
    },
    # mistralai/Ministral-8B-Instruct-2410
    "ministral": {"head_dim": 128},
    # nvidia/Minitron-8B-Base
    "nemotron": {"num_key_value_heads": 8},
}
_RELEASED["hyperclovax"] = _RELEASED["granite"]
_RELEASED |= dict.fromkeys(
    ("granitemoeshared", "granitemoe_swa", "granitemoehybrid"), _RELEASED["granitemoe"]
)


def families() -> Iterator[str]:
    """Yields every family that transformers has a causal language model of, by model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    yield from sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def usual_config(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a family's config.json, and what of it is neither its default nor a size.

    Dropout, which many defaults have and which is refused, is 0. Raises ModelError.
    """
    from transformers import CONFIG_MAPPING

    changes = copy.deepcopy(_RELEASED.get(family, {}))
    try:
        values = CONFIG_MAPPING[family](**changes).to_dict()
    except Exception as error:  # of whatever the family checks
        text = " ".join(str(error).split())
        raise NoStackError(f"transformers has no default config of {family}: {text}") from error
    without = _without_dropout(values)
    return {**_merged(values, without), "model_type": family}, {**changes, **without}


def _without_dropout(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what leaves dropout out of a config and of those within it."""
    within = {key: _without_dropout(each) for key, each in values.items() if isinstance(each, dict)}
    return {
        **{key: changes for key, changes in within.items() if changes},
        **{key: 0.0 for key, _ in dropouts(values)},
    }


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return values | {
        key: _merged(values[key], value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
