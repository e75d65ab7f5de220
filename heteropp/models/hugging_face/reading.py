"""Makes the model that plans contain of a Hugging Face config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from heteropp.models.hugging_face.attention import windows_of
from heteropp.models.hugging_face.auxiliary_loss import routers_of
from heteropp.models.hugging_face.config import Config
from heteropp.models.hugging_face.cuts import head_sizes, own_parameters, tp_refusal
from heteropp.models.hugging_face.family import LAYERS, Family, family
from heteropp.models.hugging_face.model import HuggingFaceModel, names_expert_bias
from heteropp.models.hugging_face.remote_code import RemoteCode
from heteropp.models.hugging_face.rows import uncuttable
from heteropp.models.parted import Part
from heteropp.models.spec import ModelError, Parameter

_DTYPES = ("float32", "float64", "bfloat16", "float16")
# how many experts a layer has, and each of its tokens goes to, by the names that configs have
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
)
_DEFAULT_LENGTH = 2048  # tokens, where a config has no longest sequence


def fields_of(values: dict[str, Any], code: RemoteCode | None = None) -> dict[str, Any]:
    """Returns what a config.json says, as fields of HuggingFaceModel, but its name.

    code: that of its folder, where transformers lacks the family. Raises ModelError.
    """
    if values.get("quantization_config"):
        raise ModelError("its weights are quantized (quantization_config); expected whole ones")
    config = Config.of(values, code)
    try:
        return _fields_of(values, config)
    except ModelError:
        raise
    except Exception as error:  # of whatever a family has under other names
        kind, text = values.get("model_type"), " ".join(str(error).split())
        raise ModelError(
            f"model_type {kind} is not understood: {type(error).__name__}: {text}"
        ) from error


def _fields_of(values: dict[str, Any], config: Config) -> dict[str, Any]:
    found = family(config)
    _check_routers(found)
    own = found.config
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise ModelError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    return dict(
        layers=len(found.kinds),
        hidden=own.hidden_size,
        vocab=own.vocab_size,
        sequence_length=getattr(own, "max_position_embeddings", None) or _DEFAULT_LENGTH,
        dtype=dtype,
        config=config,
        experts=_first(own, EXPERTS),
        experts_of_token=_first(own, EXPERTS_OF_TOKEN),
        order=found.kinds,
        parts=tuple(_parts(found)),
        tied_names=_tied(found),
        mixes_documents=_mixes_documents(found),
        tp_divides=tuple(head_sizes(found).items()),
        tp_refusal=tp_refusal(found),
        rows_refusal=uncuttable(found) or "",
    )


def read(
    values: dict[str, Any], name: str, code: RemoteCode | None = None, **changes: Any
) -> HuggingFaceModel:
    """Returns the model of a config.json, as `fields_of` does. Raises ModelError."""
    return HuggingFaceModel(name=name, **{**fields_of(values, code), **changes})


def _check_routers(found: Family) -> None:
    """Raises ModelError where the loss of routers is asked for and no layer has one."""
    if found.has_auxiliary_loss and not any(True for _ in routers_of(found, found.base.layers)):
        raise ModelError("output_router_logits is true; expected false, as no layer has a router")


def _first(config: Any, names: tuple[str, ...]) -> int:
    """Returns the first of some entries of a config that is there; 0: none."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _mixes_documents(found: Family) -> str:
    """Returns a kind of layer that mixes rows otherwise than by attention as we have it, if any.

    Some choose rows before they attend, and some attend within chunks of the whole sequence.
    """
    for kind in dict.fromkeys(found.kinds):
        layer = found.base.layers[found.source(kind)]
        is_recurrent = any(isinstance(each, nn.Conv1d) for each in layer.modules())
        chooses = any(name.endswith("indexer") for name, _ in layer.named_modules())
        has_chunks = getattr(found.config, "attention_chunk_size", None) is not None
        if is_recurrent or chooses or has_chunks or not any(True for _ in windows_of(layer)):
            return kind
    return ""


def _with_expert_bias(parameter: Parameter, experts: int) -> Parameter:
    """Returns a router's bias as one that trains, though without gradients, and else the same."""
    if names_expert_bias(parameter, experts):
        return replace(parameter, trains=True, decays=False)
    return parameter


def _parts(found: Family) -> list[Part]:
    experts = _first(found.config, EXPERTS)
    parts = [Part("embedding", _named(found, found.first))]
    for kind in dict.fromkeys(found.kinds):
        name = f"{LAYERS}.{found.source(kind)}"
        own = own_parameters(found, f"{name}.", found.module(name))
        parts.append(Part(kind, tuple(_with_expert_bias(each, experts) for each in own)))
    return [*parts, Part("head", _named(found, (*found.last, found.head_name)))]


def _named(found: Family, names: tuple[str, ...]) -> tuple[Parameter, ...]:
    """Returns the parameters of modules beside the layers, by their names in the base model."""
    head = found.model.get_output_embeddings()
    table = found.model.get_input_embeddings()
    result = []
    for name in names:
        module = found.module(name)
        is_cut = _cuts_vocabulary(found) and (module is head or module is table)
        for key, value in module.named_parameters():
            dimension = 0 if is_cut else None
            shape = tuple(value.shape)
            result.append(Parameter(f"{name}.{key}", shape, dimension, decays=len(shape) > 1))
    return tuple(result)


def _cuts_vocabulary(found: Family) -> bool:
    """Whether every rank of a group has its part of the vocabulary, as all have one it divides."""
    head, table = found.model.get_output_embeddings(), found.model.get_input_embeddings()
    rows = {len(head.weight), len(table.weight)}
    return (
        isinstance(head, nn.Linear)
        and isinstance(table, nn.Embedding)
        and rows == {found.config.vocab_size}
        and found.config.vocab_size % 2 == 0
    )


def _tied(found: Family) -> tuple[tuple[str, str], ...]:
    if not getattr(found.config, "tie_word_embeddings", False):
        return ()
    names = {id(m): name for name, m in found.base.named_modules()}
    table = names[id(found.model.get_input_embeddings())]
    return ((f"{found.head_name}.weight", f"{table}.weight"),)
