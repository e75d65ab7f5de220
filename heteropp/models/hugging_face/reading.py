"""Makes the model that plans contain of a Hugging Face config."""

from __future__ import annotations

from typing import Any

from heteropp.models.hugging_face.config import Config
from heteropp.models.hugging_face.family import family, own_parameters, tp_refusal
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.parted import Part
from heteropp.models.spec import ModelError, Parameter


def fields_of(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says, as fields of HuggingFaceModel, but its name.

    Raises ModelError.
    """
    if values.get("quantization_config"):
        raise ModelError("its weights are quantized (quantization_config); expected whole ones")
    config = Config.of(values)
    found = family(config)
    base, own = found.base, found.config
    vocabulary = 0 if own.vocab_size % 2 == 0 else None
    parts = [
        Part(
            "embedding",
            (Parameter("embed_tokens.weight", tuple(base.embed_tokens.weight.shape), vocabulary),),
        )
    ]
    for kind in dict.fromkeys(found.kinds):
        i = found.source(kind)
        parts.append(Part(kind, own_parameters(found, f"layers.{i}.", base.layers[i])))
    head = [
        Parameter(f"norm.{key}", tuple(value.shape), None, decays=False)
        for key, value in base.norm.named_parameters()
    ]
    out = found.model.get_output_embeddings()
    for key, value in out.named_parameters():
        head.append(
            Parameter(f"lm_head.{key}", tuple(value.shape), vocabulary, decays=value.dim() > 1)
        )
    parts.append(Part("head", tuple(head)))
    tied = own.tie_word_embeddings
    heads = {"num_attention_heads": own.num_attention_heads}
    if getattr(own, "num_key_value_heads", None):
        heads["num_key_value_heads"] = own.num_key_value_heads
    return dict(
        layers=len(found.kinds),
        hidden=own.hidden_size,
        vocab=own.vocab_size,
        sequence_length=own.max_position_embeddings,
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
        config=config,
        order=found.kinds,
        parts=tuple(parts),
        tied_names=(("lm_head.weight", "embed_tokens.weight"),) if tied else (),
        tp_divides=tuple(heads.items()),
        tp_refusal=tp_refusal(found),
    )


def read(values: dict[str, Any], name: str, **changes: Any) -> HuggingFaceModel:
    """Returns the model of a config.json. Raises ModelError."""
    return HuggingFaceModel(name=name, **{**fields_of(values), **changes})
