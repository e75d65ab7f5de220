"""A family's own model on meta: its parts, and the kinds of its layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from heteropp.models.hugging_face import experts
from heteropp.models.hugging_face.config import Config, family_config
from heteropp.models.spec import ModelError

LAYERS = "layers"
_OWN_NUMBERS = ("layer_idx", "layer_number")  # of a layer, which say nothing of its kind
_LAYER_NUMBERS = ("num_hidden_layers", "num_layers", "n_layer")
# what a base model multiplies activations with that enter it, and does so again in every stage
_MULTIPLIERS = ("embedding_multiplier",)
# how many values layers return, of families whose layers return a tuple
_OUTPUTS = {"bamba": 2, "falcon_h1": 1, "gpt_neox_japanese": 1, "glm_moe_dsa": 2}
# families whose auxiliary loss is transformers' load_balancing_loss_func, as has been tried
AUXILIARY_LOSS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "flex_olmo"),
    *("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa", "jamba"),
    *("ernie4_5_moe", "minimax", "minimax_m2", "mellum", "flint", "laguna"),
)
_REFUSED = {
    "biogpt": "adds positions to whatever enters its layers",
    "falcon_h1": "has multipliers in its layers that only the whole model makes",
    "inkling2_text": "has layers that look back on what several before them gave",
    "phimoe": "draws the experts of each token at random while it trains",
    "recurrent_gemma": "scales whatever enters its layers",
}


class NoStackError(ModelError):
    """The family's model is no stack of layers between a table and a head."""


@dataclass(frozen=True, eq=False)
class Family:
    """The whole model, on meta."""

    config: Any  # transformers' own
    model: Any  # with its head
    first: tuple[str, ...]  # modules of the base model before its layers, by name
    last: tuple[str, ...]  # those behind them
    kinds: tuple[str, ...]  # of each layer
    outputs: int | None  # how many values layers return in a tuple; None: activations alone

    @property
    def base(self) -> Any:
        return self.model.get_submodule(self.model.base_model_prefix)

    @property
    def head_name(self) -> str:
        """The name of the layer that gives logits, which is none of the base model's."""
        head = self.model.get_output_embeddings()
        return next(name for name, module in self.model.named_modules() if module is head)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether config.json asks for the loss of its routers."""
        return bool(getattr(self.config, "output_router_logits", False))

    def source(self, kind: str) -> int:
        """Returns the first layer of a kind; the others are like it."""
        return self.kinds.index(kind)

    def module(self, name: str) -> nn.Module:
        """Returns a module by its name in the base model, or the head."""
        head: nn.Module = self.model.get_output_embeddings()
        return head if name == self.head_name else self.base.get_submodule(name)

    def copy_of(self, module: nn.Module) -> Any:
        """Returns a copy that shares the config."""
        return copy.deepcopy(module, {id(self.config): self.config})


@lru_cache(maxsize=8)
def family(config: Config) -> Family:
    """Makes a family's model on meta. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    own = family_config(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own)
    except Exception as error:  # of whatever the family checks
        text = " ".join(str(error).split())[:200]
        raise NoStackError(
            f"transformers cannot make the model: {type(error).__name__}: {text}"
        ) from error
    own = model.config
    own._experts_implementation = experts.NAME
    model.base_model_prefix = base_name(model)
    base = getattr(model, model.base_model_prefix, None)
    if base is None or not hasattr(base, LAYERS) or model.get_output_embeddings() is None:
        raise NoStackError(
            f"model_type {own.model_type} has no {LAYERS} between a table and a head"
        )
    modules = tuple(own.base_model_pp_plan or _modules(base))
    cut = modules.index(LAYERS)
    kinds = tuple(_kinds(own, base.layers))
    # of a family that nobody here knows it is found out
    outputs = (_OUTPUTS.get(own.model_type),) if config.code is None else (None, 1, 2)
    candidates = [Family(own, model, modules[:cut], modules[cut + 1 :], kinds, n) for n in outputs]
    _check_parts(candidates[0])
    return _enterable(candidates)


def base_name(model: Any) -> str:
    """Returns the name of a model's base model, which of some families is not as they say."""
    name: str = model.base_model_prefix
    return name if hasattr(model, name) else "model"


def _modules(base: nn.Module) -> Iterator[str]:
    """Yields the modules of a base model that has no pipeline plan, as they follow each other."""
    for name, child in base.named_children():
        if name == LAYERS or any(True for _ in child.parameters()):
            yield name


def dropouts(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields what a config says of dropout between layers, where it is not 0."""
    for key, value in values.items():
        is_dropout = str(key).endswith(("dropout", "pdrop")) and not key.startswith("classifier")
        if is_dropout and isinstance(value, float) and value > 0:
            yield key, value


def _check_parts(found: Family) -> None:
    """Raises ModelError when something of the model is in none of its parts."""
    kind = found.config.model_type
    if kind in _REFUSED:
        raise ModelError(f"model_type {kind} {_REFUSED[kind]}")
    if "shared" in (getattr(found.config, "indexer_types", None) or ()):
        raise ModelError("indexer_types has shared: what a layer chose would cross stages")
    if jitter := getattr(found.config, "router_jitter_noise", 0.0):
        raise ModelError(
            f"router_jitter_noise is {jitter}; expected 0, as ranks would choose unlike experts"
        )
    for key, value in dropouts(found.config.to_dict()):
        raise ModelError(f"{key} is {value}; expected 0, as dropout is left out")
    for name, module in found.model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(f"{name} is a dropout of {module.p}; expected 0, as it is left out")
    if found.has_auxiliary_loss and kind not in AUXILIARY_LOSS:
        raise ModelError(
            f"output_router_logits is true; expected false, as the auxiliary loss of {kind} is not "
            f"trained; that of {', '.join(AUXILIARY_LOSS)} is"
        )
    prefix = f"{found.model.base_model_prefix}."
    parts = {*found.first, LAYERS, *found.last}
    for name, _ in found.model.named_parameters():
        in_base = name.removeprefix(prefix)
        if in_base.split(".")[0] not in parts and not name.startswith(f"{found.head_name}."):
            raise ModelError(
                f"model_type {kind} has {name} beside its layers, which no stage would hold"
            )
    owners: dict[int, str] = {}
    for name, value in found.base.layers.named_parameters(remove_duplicate=False):
        if (owner := owners.setdefault(id(value), name)) != name:
            raise ModelError(f"model_type {kind} has one parameter as {owner} and {name} of layers")


def _enterable(candidates: Sequence[Family]) -> Family:
    """Returns the first that can be entered between its layers.

    Raises ModelError, which says what is wrong with the first.
    """
    problems = []
    for found in candidates:
        try:
            with torch.device("cpu"):  # also where a tracer builds on meta
                _check_entrance(found)
            return found
        except ModelError as error:
            problems.append(error)
    raise problems[0]


@torch.no_grad()
def _check_entrance(found: Family) -> None:
    """Raises ModelError unless activations that enter between layers reach the next one as they
    are.
    """
    kind, hidden = found.config.model_type, found.config.hidden_size
    x = torch.linspace(-1, 1, 2 * hidden).view(1, 2, hidden)
    try:
        base = around(found, {}, list(range(len(found.kinds))), "cpu")
        positions = torch.arange(2).unsqueeze(0)
        result = base(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"model_type {kind} cannot be entered between its layers: "
            f"{type(error).__name__}: {text}"
        ) from error
    if not isinstance(result, Tensor) or not torch.equal(result, x):
        raise ModelError(f"model_type {kind} changes the activations that enter between its layers")


class Absent(nn.Module):
    """Stands where a layer is that another stage holds, and hands activations on."""

    def __init__(self, layer: nn.Module, outputs: int | None) -> None:
        """outputs: how many values the layer returns in a tuple; None: activations alone."""
        super().__init__()
        self.outputs = outputs
        for key, value in vars(layer).items():  # a family's loop asks a layer for its kind
            if isinstance(value, str | int | float | bool | None) and key != "training":
                setattr(self, key, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        if self.outputs is None:
            return hidden_states
        return (hidden_states, *[None] * (self.outputs - 1))


def around(
    found: Family,
    held: dict[str, nn.Module],
    sources: list[int],
    device: torch.device | str,
) -> Any:
    """Returns the base model around what a stage holds, with what others hold absent.

    held: by name in the base model, such as "layers.3"; sources: for each of the model's layers, a
    layer of the whole model that is like it.
    """
    config = copy.copy(found.config)
    for key, value in per_layer(found.config, len(found.kinds)).items():
        setattr(config, key, [value[source] for source in sources])
    for key, layers in layer_numbers(found, len(sources)).items():
        setattr(config, key, layers)
    base = shallow(found.base)
    base.config = config
    base.layers = nn.ModuleList(
        held.get(f"{LAYERS}.{i}", Absent(found.base.layers[source], found.outputs))
        for i, source in enumerate(sources)
    )
    for name, child in found.base.named_children():
        if name in (*found.first, *found.last):
            setattr(base, name, held.get(name, nn.Identity()))
        elif name != LAYERS:
            setattr(base, name, with_buffers(found, found.copy_of(child), device))
    if not held or found.first[0] not in held:
        for name in _MULTIPLIERS:
            if hasattr(base, name):
                setattr(base, name, 1.0)
    return base


def layer_numbers(found: Family, layers: int) -> dict[str, int]:
    """Returns what a config says with so many layers, in the names that it has for their number."""
    own = {key: getattr(found.config, key, None) for key in _LAYER_NUMBERS}
    return {key: value * layers // len(found.kinds) for key, value in own.items() if value}


def shallow(module: nn.Module) -> Any:
    """Returns a module that shares all with another, but in which parts can be replaced."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    result._buffers = dict(module._buffers)
    return result


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


def per_layer(config: Any, layers: int) -> dict[str, Sequence[Any]]:
    """Returns what a config lists for each layer."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if isinstance(value, list | tuple) and len(value) == layers
        if list(value) != list(range(layers))  # which are numbers of layers, such as of all
    }


def _signature(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        scalars = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, str | int | float | bool | None) and key not in _OWN_NUMBERS
        }
        yield name, type(module).__name__, repr(sorted(scalars.items()))
        for key, parameter in module.named_parameters(recurse=False):
            yield key, tuple(parameter.shape)


@torch.no_grad()
def with_buffers(found: Family, module: nn.Module, device: torch.device | str) -> nn.Module:
    """Gives a module its tables, which the family makes when it initialises weights."""
    for each in module.modules():
        names = [name for name, value in each._buffers.items() if value is not None]
        for name in names:
            buffer = each._buffers[name]
            assert buffer is not None
            each._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
            original = f"original_{name}"
            if original not in names and getattr(each, original, None) is not None:
                setattr(each, original, each._buffers[name])
        if names:
            with torch.device("cpu"):
                found.model._init_weights(each)
            for name in names:
                each._buffers[name] = each._buffers[name].to(device)  # type: ignore[union-attr]
    return module
