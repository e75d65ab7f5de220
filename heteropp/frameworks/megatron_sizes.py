"""A model's sizes under the names of Megatron-LM's arguments, which FlagScale takes as well."""

from __future__ import annotations

from heteropp.frameworks.file import Replacement
from heteropp.models.gpt2.model import GPT2Model
from heteropp.models.llama.model import LlamaModel, RopeScaling
from heteropp.models.spec import ModelSpec

Setting = bool | int | float | str
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}  # by a plan's; float32 needs no argument
# of the family's config.json, where its scaling is Llama 3's; Megatron has them fixed
LLAMA_3 = (1.0, 4.0, 8192)


def model_settings(model: ModelSpec) -> tuple[dict[str, Setting], list[Replacement]]:
    """Returns arguments by name, of which True is a flag, and what has none."""
    settings: dict[str, Setting] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "seq-length": model.sequence_length,
        "vocab-size": model.vocab,
        "make-vocab-size-divisible-by": 1,
    }
    found: list[Replacement] = []
    if isinstance(model, LlamaModel):
        settings |= _llama(model)
        if model.rope_scaling is not None:
            settings |= _scaling(model.rope_scaling, found)
    elif isinstance(model, GPT2Model):
        settings |= _gpt2(model)
    else:
        found.append(
            Replacement(
                f"model of family {model.family} ({model.describe()})",
                "its layers, width, vocabulary and sequence length; add its other arguments",
            )
        )
    if model.dtype in DTYPES:
        settings[DTYPES[model.dtype]] = True
    elif model.dtype != "float32":
        found.append(Replacement(f"dtype {model.dtype}", "float32"))
    if isinstance(model, LlamaModel):  # the others do not say how attention is computed
        settings["attention-backend"] = "flash" if model.attention == "fused" else "unfused"
    return settings, found


def _llama(model: LlamaModel) -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "ffn-hidden-size": model.intermediate,
        "num-attention-heads": model.heads,
        "max-position-embeddings": model.sequence_length,
        "position-embedding-type": "rope",
        "rotary-base": int(model.rope_theta),
        "normalization": "RMSNorm",
        "norm-epsilon": model.norm_eps,
        "swiglu": True,
        "disable-bias-linear": True,
        "attention-dropout": 0.0,
        "hidden-dropout": model.dropout,
    }
    if model.kv_heads != model.heads:
        settings |= {"group-query-attention": True, "num-query-groups": model.kv_heads}
    if not model.tied_embeddings:
        settings["untie-embeddings-and-output-weights"] = True
    return settings


def _scaling(scaling: RopeScaling, found: list[Replacement]) -> dict[str, Setting]:
    rest = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    if rest != LLAMA_3:
        found.append(
            Replacement(f"rotary scaling between {rest}", f"{LLAMA_3}, as Llama 3.1 has it")
        )
    return {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}


def _gpt2(model: GPT2Model) -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "ffn-hidden-size": model.intermediate,
        "num-attention-heads": model.heads,
        "max-position-embeddings": model.positions,
        "position-embedding-type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm-epsilon": model.norm_eps,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    if not model.tied_embeddings:
        settings["untie-embeddings-and-output-weights"] = True
    return settings
