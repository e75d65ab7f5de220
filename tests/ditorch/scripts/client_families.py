"""Tiny models of transformers' families, unchanged, on this process's device and on the CPU.

python client_families.py FAMILY...: for each, the losses of three training steps and what greedy
generation writes, as lines of JSON. The same initial values and tokens everywhere.
"""

import json
import sys
from typing import Any

import torch
import transformers

import ditorch

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MOE = EXPERTS | {"moe_intermediate_size": 16, "decoder_sparse_step": 1}
TO_TEXT = {
    "vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "max_target_positions": 64, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}

# family -> (what its configuration adds to SMALL, or TO_TEXT for an encoder and a decoder)
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "llama": {},
    "qwen3_moe": MOE | {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4, "use_mambapy": False},
    "mistral": {"sliding_window": 8},
    "mixtral": MOE,
    "qwen2": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": GPT | {"rotary_dim": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_bigcode": GPT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "falcon": {"new_decoder_architecture": False},
    "olmo": {},
    "olmo2": {},
    "olmoe": MOE,
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "granite": {},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}
MASKED = {"bert": {}}  # trained alone: it generates nothing
ENCODER_DECODERS: dict[str, dict[str, Any]] = {"t5": {}, "bart": {}}


def make(family: str) -> Any:
    """The family's model for its task, with initial values that depend on the seed alone."""
    small = TO_TEXT if family in ENCODER_DECODERS else SMALL
    added = (DECODERS | MASKED | ENCODER_DECODERS)[family]
    config = transformers.AutoConfig.for_model(family, **(small | added))
    config._attn_implementation = "eager"
    for name in dir(config):  # dropout draws other numbers on another device
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    kind = {"bert": "MaskedLM"} | dict.fromkeys(ENCODER_DECODERS, "Seq2SeqLM")
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{kind.get(family, 'CausalLM')}").from_config(config)


def train_and_generate(family: str, device: torch.device | str) -> tuple[list[float], list[int]]:
    """Three steps whose optimizer is older than the move to the device, then twelve tokens."""
    model = make(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(device).train()
    tokens = (torch.arange(24).view(2, 12) * 7 % 61 + 3).to(device)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if family in MASKED:
        return losses, []
    written = model.eval().generate(tokens[:, :4], max_new_tokens=12, do_sample=False)
    return losses, written.flatten().tolist()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for family in sys.argv[1:]:
        try:
            chip = train_and_generate(family, "device")
            print(
                json.dumps([family, str(ditorch.device), chip, train_and_generate(family, "cpu")])
            )
        except Exception as error:
            print(
                json.dumps([family, str(ditorch.device), f"{type(error).__name__}: {error}"[:600]])
            )
        sys.stdout.flush()
