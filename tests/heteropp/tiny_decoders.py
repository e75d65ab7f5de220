"""Tiny configs of families that transformers knows, and folders of models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "query_pre_attn_scalar": 16,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PER_LAYER = ("layer_types", "mlp_layer_types")


def tiny_config(model_type: str, layers: int = 3, **changes: Any) -> Any:
    """Returns transformers' config of a family; its layers take turns at all kinds it has."""
    from transformers import CONFIG_MAPPING

    family = CONFIG_MAPPING[model_type]
    usual = family()
    sizes = {name: value for name, value in SIZES.items() if hasattr(usual, name)}
    sizes["num_hidden_layers"] = layers
    for name in PER_LAYER:
        if kinds := list(dict.fromkeys(getattr(usual, name, None) or ())):
            sizes[name] = [kinds[i % len(kinds)] for i in range(layers)]
    if hasattr(usual, "qk_rope_head_dim"):  # latent attention
        sizes |= {"head_dim": 8, "num_key_value_heads": SIZES["num_attention_heads"]}
    return family(**{**sizes, **changes})


def write_folder(
    folder: Path,
    model_type: str,
    dtype: torch.dtype = torch.float32,
    noise: float | None = None,
    **changes: Any,
) -> Any:
    """Writes a model with random weights as transformers does, and returns it as it loads it.

    noise: of what is added to the family's initial values; absent, they count for nothing.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=dtype)
    with torch.no_grad():
        for value in model.state_dict().values():  # so that no two can be taken for one another
            if value.is_floating_point():
                random = torch.randn(value.shape) * (noise or 0.5)
                value.copy_(value + random if noise else random)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(folder)  # now each in the dtype in which transformers holds it
    return loaded.eval()
