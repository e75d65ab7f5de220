"""Cuts a user's modules over the ranks of a tensor-parallel group, as the definition's table says.

The modules stay the user's: Linear and Embedding layers that are cut get smaller weights and
communicate, and every Linear layer lets its weights' gradients wait (see parallel.backward).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from heteropp.models.custom.definition import Cut, ModelDefinition
from heteropp.models.parallel.backward import linear
from heteropp.models.parallel.tensor_parallel import (
    TensorParallelGroup,
    copy_to_group,
    embed,
    sum_over_group,
)
from heteropp.models.spec import ModelError, Parameter

LAYERS = (nn.Linear, nn.Embedding)  # layers that communicate where they are cut


class ParallelLinear(nn.Linear):
    """A user's Linear layer, of which a rank has a part."""

    rule: Any  # Cut
    group: Any  # TensorParallelGroup

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.rule == "row" and self.group.size > 1:
            y = sum_over_group(linear(rows, self.weight), self.group)
            y = y if self.bias is None else y + self.bias
        else:
            if self.rule == "column" or isinstance(self.rule, tuple):
                rows = copy_to_group(rows, self.group)
            y = linear(rows, self.weight, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class ParallelEmbedding(nn.Embedding):
    """A user's Embedding layer, of whose vocabulary a rank has a part."""

    group: Any  # TensorParallelGroup

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weight, self.group)


def part_parameters(definition: ModelDefinition, part: str, module: nn.Module) -> list[Parameter]:
    """Returns a part's parameters, and how they are cut. Raises ModelError."""
    result = []
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        rule, owner = _rule(definition, part, module, name)
        full_name = f"{part}.{name}"
        dimension = _dimension(rule, owner, name)
        packed: tuple[int, ...] = ()
        if dimension is not None and dimension >= len(shape):
            raise ModelError(f"{full_name} has shape {list(shape)}, which rule {rule!r} cannot cut")
        if isinstance(rule, tuple):
            packed = _packed(full_name, rule, shape[0])
        decays = not any(fnmatchcase(full_name, each) for each in definition.no_weight_decay)
        partial = rule == "partial"
        result.append(Parameter(name, shape, dimension, packed, partial, decays))
    return result


def unused_rules(definition: ModelDefinition, parts: dict[str, nn.Module]) -> Iterator[str]:
    """Yields the patterns of the definition's tables that fit nothing."""
    names = [
        f"{part}.{name}"
        for part, module in parts.items()
        for name in (
            *(name for name, _ in module.named_modules() if name),
            *(name for name, _ in module.named_parameters()),
        )
    ]
    for pattern in (*(definition.cut or ()), *definition.no_weight_decay):
        if not any(fnmatchcase(name, pattern) for name in names):
            yield pattern


def install(
    definition: ModelDefinition,
    part: str,
    module: nn.Module,
    parameters: list[Parameter],
    group: TensorParallelGroup,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.Module:
    """Makes a part, whose parameters may be on meta, one rank's, with uninitialised parameters."""
    rules = {
        name: _rule(definition, part, module, f"{name}.weight".lstrip("."))[0]
        for name, layer in module.named_modules()
        if type(layer) in LAYERS
    }
    for parameter in parameters:
        owner, _, leaf = parameter.name.rpartition(".")
        value = torch.empty(parameter.held_shape(group.size), device=device, dtype=dtype)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value))
    for name, rule in rules.items():
        layer: Any = module.get_submodule(name)
        if type(layer) is nn.Linear:
            layer.__class__ = ParallelLinear
            layer.rule, layer.group = rule, group  # type: ignore[assignment]
        elif rule == "vocabulary":
            layer.__class__ = ParallelEmbedding
            layer.group = group
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        setattr(module.get_submodule(owner), leaf, buffer.to(device=device, dtype=kind))
    return module


def _rule(
    definition: ModelDefinition, part: str, module: nn.Module, name: str
) -> tuple[Cut, nn.Module | None]:
    """Returns the rule for a parameter, and the layer that it is for; None: the parameter alone."""
    if definition.cut is None:
        return "replicated", None
    owner, _, _ = name.rpartition(".")
    layer = module.get_submodule(owner)
    for pattern, rule in definition.cut.items():
        if owner and fnmatchcase(f"{part}.{owner}", pattern):
            return rule, layer
        if fnmatchcase(f"{part}.{name}", pattern):
            return rule, layer if type(layer) in LAYERS else None
    raise ModelError(
        f"no rule cuts {part}.{name}; give it one, such as replicated, where every rank has a copy"
    )


def _dimension(rule: Cut, layer: nn.Module | None, name: str) -> int | None:
    """Returns the dimension of a parameter that is cut."""
    if rule in ("replicated", "partial"):
        return None
    kind: str = rule[0] if isinstance(rule, tuple) else rule
    if kind not in ("column", "row", "vocabulary", "packed"):
        raise ModelError(
            f"rule {rule!r} for {name}: expected column, row, vocabulary, replicated, partial or "
            '("packed", pieces)'
        )
    if layer is None:
        return 1 if kind == "row" else 0
    expected = nn.Embedding if kind == "vocabulary" else nn.Linear
    if type(layer) is not expected:
        raise ModelError(
            f"rule {kind} for {name}, which is of a {type(layer).__name__}; expected a "
            f"{expected.__name__}"
        )
    if kind == "vocabulary":
        _check_plain(layer, name)
    if kind == "row":
        return None if name.endswith("bias") else 1
    return 0


def _check_plain(layer: Any, name: str) -> None:
    for option, plain in (
        ("padding_idx", None),
        ("max_norm", None),
        ("scale_grad_by_freq", False),
        ("sparse", False),
    ):
        if getattr(layer, option) != plain:
            raise ModelError(
                f"{name} is cut, and its layer has {option} {getattr(layer, option)}; expected "
                f"{plain}, or rule replicated"
            )


def _packed(name: str, rule: tuple[Any, ...], size: int) -> tuple[int, ...]:
    pieces = rule[1] if len(rule) == 2 else None
    if isinstance(pieces, int):
        pieces = (size // max(1, pieces),) * pieces
    if not isinstance(pieces, Sequence) or not all(isinstance(each, int) for each in pieces):
        raise ModelError(
            f"rule {rule!r} for {name}: expected the number of pieces or their sizes, such as "
            '("packed", 3)'
        )
    if sum(pieces) != size or min(pieces) < 1:
        raise ModelError(f"{name} has {size} rows, which pieces {pieces} do not make up")
    return tuple(pieces)
