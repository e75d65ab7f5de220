"""A stage of a family's model: the family's own forward over the layers that a rank holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heteropp.layout.parameter import Parameter
from heteropp.models.custom.cutting import ParallelEmbedding, ParallelLinear
from heteropp.models.hugging_face.family import EXPERTS, Family, family, per_layer
from heteropp.models.parallel.tensor_parallel import (
    SoloGroup,
    TensorParallelGroup,
    copy_to_group,
    cross_entropy_sum,
    sum_over_group,
)
from heteropp.models.stage_module import StageModule

if TYPE_CHECKING:
    from heteropp.models.hugging_face.model import HuggingFaceModel


class Absent(nn.Module):
    """Stands where a layer is that another stage holds, and hands activations on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for key, value in vars(layer).items():  # a family's loop asks a layer for its kind
            if isinstance(value, str | int | float | bool | None) and key != "training":
                setattr(self, key, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class HuggingFaceStage(StageModule):
    def __init__(
        self,
        model: HuggingFaceModel,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, layers, group)
        self.length, self.hidden, self.vocab = model.sequence_length, model.hidden, model.vocab
        found = family(model.config)
        kind = {"device": device, "dtype": dtype}
        own = {p.name: p for p in model.parameters(layers)}
        sources = [found.source(each) for each in model.order]

        def held(module: nn.Module, prefix: str, in_base: str) -> nn.Module:
            mine = {n.removeprefix(prefix): p for n, p in own.items() if n.startswith(prefix)}
            return install(found, module, mine, in_base, group, **kind)

        if self.is_first:
            self.embed_tokens = held(found.base.embed_tokens, "embed_tokens.", "embed_tokens.")
        self.layers = nn.ModuleDict(
            {
                str(i): held(found.base.layers[sources[i]], f"layers.{i}.", f"layers.{sources[i]}.")
                for i in range(*layers)
            }
        )
        if self.is_last:
            self.norm = held(found.base.norm, "norm.", "norm.")
            self.lm_head = held(found.model.get_output_embeddings(), "lm_head.", "lm_head.")
            if self.is_first and "lm_head.weight" in model.tied:
                self.lm_head.weight = self.embed_tokens.weight
        # in a tuple, as what is held has its names above
        self.whole = (self._around(found, sources, device),)

    def _around(self, found: Family, sources: list[int], device: torch.device | str) -> Any:
        """Returns the family's model around what this stage holds."""
        config = copy.copy(found.config)
        for key, value in per_layer(found.config, len(found.kinds)).items():
            setattr(config, key, [value[source] for source in sources])
        config.num_hidden_layers = len(sources)
        base = shallow(found.base)
        base.config = config
        base.layers = nn.ModuleList(
            self.layers[str(i)] if str(i) in self.layers else Absent(found.base.layers[source])
            for i, source in enumerate(sources)
        )
        base.embed_tokens = self.embed_tokens if self.is_first else None
        base.norm = self.norm if self.is_last else nn.Identity()
        for name, child in found.base.named_children():
            if name not in ("embed_tokens", "layers", "norm"):
                setattr(base, name, with_buffers(found, copy.deepcopy(child), device))
        model = shallow(found.model)
        model.config = config
        setattr(model, found.model.base_model_prefix, base)
        model.lm_head = self.lm_head if self.is_last else None
        return model

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Tensor | None = None,
    ) -> Tensor:
        assert documents is None, "refused before anything starts"
        (model,) = self.whole
        if self.is_first:
            given = {"input_ids": x.view(-1, self.length)}
        else:
            given = {"inputs_embeds": x.view(-1, self.length, self.hidden)}
        if not self.is_last:
            base = model.get_submodule(model.base_model_prefix)
            return base(**given, use_cache=False).last_hidden_state.reshape(-1, self.hidden)
        assert targets is not None
        logits = model(**given, use_cache=False).logits
        logits = logits.reshape(-1, logits.shape[-1])
        is_cut = logits.shape[-1] != self.vocab
        return cross_entropy_sum(logits, targets, self.group if is_cut else SoloGroup())


def shallow(module: nn.Module) -> Any:
    """Returns a module that shares all with another, but in which parts can be replaced."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    found._buffers = dict(module._buffers)
    return found


def install(
    found: Family,
    module: nn.Module,
    parameters: Mapping[str, Parameter],
    in_base: str,
    group: TensorParallelGroup,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.Module:
    """Returns a copy of a part as one rank holds it, with uninitialised parameters.

    parameters: by name in the part; in_base: what its names begin with in the base model.
    """
    trained = {name for name, _ in module.named_parameters()}
    module = with_buffers(found, copy.deepcopy(module), device)
    for name, parameter in parameters.items():
        shapes = [box.shape for box in parameter.boxes(group.size, group.index)]
        shape = list(shapes[0])
        if shapes[1:]:
            shape[parameter.split_dimension or 0] = sum(
                each[parameter.split_dimension or 0] for each in shapes
            )
        owner, _, leaf = name.rpartition(".")
        value = torch.empty(shape, device=device, dtype=dtype)
        setattr(
            module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=name in trained)
        )
    for name, layer in module.named_modules():
        _cut(found, name, layer, parameters, in_base, group)
    return module


def _cut(
    found: Family,
    name: str,
    layer: Any,
    parameters: Mapping[str, Parameter],
    in_base: str,
    group: TensorParallelGroup,
) -> None:
    weight = parameters.get(f"{name}.weight".lstrip("."))
    dimension = weight.split_dimension if weight else None
    if type(layer) is nn.Linear and weight is not None:
        layer.__class__ = ParallelLinear
        layer.group = group
        layer.rule = "replicated" if dimension is None else ("column", "row")[dimension]
    elif type(layer) is nn.Embedding and dimension == 0:
        layer.__class__ = ParallelEmbedding
        layer.group = group
    elif found.style(f"{in_base}{name}") == EXPERTS and group.size > 1:

        def enter(_module: nn.Module, arguments: tuple, named: dict) -> tuple[tuple, dict]:
            def copied(value: Any) -> Any:
                is_float = isinstance(value, Tensor) and value.is_floating_point()
                return copy_to_group(value, group) if is_float else value

            return tuple(map(copied, arguments)), {k: copied(v) for k, v in named.items()}

        def leave(_module: nn.Module, _arguments: tuple, _named: dict, result: Tensor) -> Tensor:
            return sum_over_group(result, group)

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave, with_kwargs=True)


@torch.no_grad()
def with_buffers(found: Family, module: nn.Module, device: torch.device | str) -> nn.Module:
    """Gives a module its tables, which the family makes when it initialises weights."""
    for each in module.modules():
        names = [name for name, value in each._buffers.items() if value is not None]
        for name in names:
            buffer = each._buffers[name]
            assert buffer is not None
            each._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            if (
                getattr(each, f"original_{name}", None) is not None
                and f"original_{name}" not in names
            ):
                setattr(each, f"original_{name}", each._buffers[name])
        if names:
            with torch.device("cpu"):
                found.model._init_weights(each)
            for name in names:
                each._buffers[name] = each._buffers[name].to(device)  # type: ignore[union-attr]
    return module
