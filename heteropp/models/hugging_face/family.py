"""A family's own model on meta: its parts, the kinds of its layers, and how its weights are cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from heteropp.layout.parameter import Parameter
from heteropp.models.hugging_face.config import Config, family_config
from heteropp.models.spec import ModelError

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
PACKED_COLUMN, EXPERTS = "packed_colwise", "moe_tp_experts"
KNOWN = (COLUMN, ROW, PARTIAL, PACKED_COLUMN, EXPERTS)


@dataclass(frozen=True, eq=False)
class Family:
    """The whole model, on meta."""

    config: Any  # transformers' own
    model: Any  # with its head
    kinds: tuple[str, ...]  # of each layer

    @property
    def base(self) -> Any:
        return self.model.get_submodule(self.model.base_model_prefix)

    def source(self, kind: str) -> int:
        """Returns the first layer of a kind; the others are like it."""
        return self.kinds.index(kind)

    @property
    def plan(self) -> dict[str, str]:
        """The family's tensor-parallel plan, by pattern after the base model's name."""
        return dict(self.config.base_model_tp_plan or {})

    def style(self, name: str) -> str | None:
        """Returns the style of a layer or parameter by its name in the base model, if it has one."""
        return self.plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


@lru_cache(maxsize=8)
def family(config: Config) -> Family:
    """Makes a family's model on meta. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    found = family_config(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"transformers cannot make the model: {type(error).__name__}: {text}"
        ) from error
    base = model.get_submodule(model.base_model_prefix)
    parts = list((found.base_model_pp_plan or {}).keys())
    if parts != ["embed_tokens", "layers", "norm"]:
        raise ModelError(
            f"model_type {found.model_type} has no pipeline plan of embed_tokens, layers and norm"
        )
    return Family(found, model, tuple(_kinds(found, base.layers)))


def _kinds(config: Any, layers: nn.ModuleList) -> Iterator[str]:
    """Yields a name for each layer; layers of one name are alike but for their number."""
    names: dict[tuple, str] = {}
    used: dict[str, int] = {}
    for i, layer in enumerate(layers):
        listed = {k: v[i] for k, v in per_layer(config, len(layers)).items()}
        signature = (repr(sorted(listed.items())), *_signature(layer))
        if signature not in names:
            name = str(listed.get("layer_types", "layer"))
            if any("experts" in each for each, _ in layer.named_parameters()):
                name += "_experts"
            used[name] = used.get(name, 0) + 1
            names[signature] = name if used[name] == 1 else f"{name}_{used[name]}"
        yield names[signature]


def per_layer(config: Any, layers: int) -> dict[str, list]:
    """Returns what a config lists for each layer."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if isinstance(value, list | tuple) and len(value) == layers
    }


def _signature(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        scalars = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, str | int | float | bool | None) and key != "layer_idx"
        }
        yield name, type(module).__name__, repr(sorted(scalars.items()))
        for key, parameter in module.named_parameters(recurse=False):
            yield key, tuple(parameter.shape)


def own_parameters(found: Family, prefix: str, module: nn.Module) -> tuple[Parameter, ...]:
    """Returns a part's parameters, by their names in it, and how they are cut.

    Its tables that folders hold, such as a router's correction, are parameters without a gradient.
    prefix: the part's name in the base model, such as "layers.3.".
    """
    trained = {name for name, _ in module.named_parameters()}
    return tuple(
        _parameter(found, prefix, name, tuple(value.shape), name in trained)
        for name, value in module.state_dict().items()
        if value.is_floating_point()
    )


def _parameter(
    found: Family, prefix: str, name: str, shape: tuple[int, ...], trained: bool
) -> Parameter:
    owner, _, leaf = name.rpartition(".")
    style = found.style(f"{prefix}{owner}") or found.style(f"{prefix}{name}")
    decays = len(shape) > 1 and trained
    if style == COLUMN:
        return Parameter(name, shape, 0, decays=decays)
    if style == ROW:
        return Parameter(name, shape, None if leaf == "bias" else len(shape) - 1, decays=decays)
    if style == PACKED_COLUMN:
        cut = len(shape) - 2
        half = shape[cut] // 2
        return Parameter(name, shape, cut, (half, half), decays=decays)
    return Parameter(name, shape, None, partial=style == PARTIAL, decays=decays)


def tp_refusal(found: Family) -> str:
    """Says in a clause why tensor parallelism is not possible; "" where it is."""
    if not found.plan:
        return f"model_type {found.config.model_type} has no tensor-parallel plan"
    for pattern, style in found.plan.items():
        if style not in KNOWN:
            return f"style {style} of {pattern} has no form here yet"
    return ""
