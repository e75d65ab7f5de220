"""A family's modules as one rank of a tensor-parallel group holds them.

They stay the family's: layers that are cut have smaller weights and communicate, and every Linear
layer lets its weights' gradients wait (see parallel.backward).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from heteropp.layout.parameter import Parameter
from heteropp.models.hugging_face import cuts as styles
from heteropp.models.hugging_face.communication import GroupCommunication
from heteropp.models.hugging_face.cuts import Cuts, cuts_of, kept_buffers
from heteropp.models.hugging_face.experts import spread
from heteropp.models.hugging_face.family import LAYERS, Family, with_buffers
from heteropp.models.hugging_face.lora import A, Lora, is_added
from heteropp.models.hugging_face.norms import epsilon_of, fused
from heteropp.models.hugging_face.rows import AllRows, modules_of_all_rows
from heteropp.models.parallel.backward import linear
from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
from heteropp.models.parallel.tensor_parallel import TensorParallelGroup, embed


class CutLinear(nn.Linear):
    """A Linear layer, of which a rank has a part or a copy."""

    ranks: Any  # GroupCommunication
    style: str | None
    copies: bool  # whether its input is not yet a copy for the group
    scale = 0.0  # of LoRA's product beside it; 0: it has none
    lora_A: nn.Module
    lora_B: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y = self._of_rows(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-2], -1, y.shape[-1])  # a head may have gathered rows

    def _of_rows(self, x: Tensor) -> Tensor:
        if self.style in styles.ROWS and self.ranks.group.size > 1:
            if self.style == styles.SPLIT:
                x = self.ranks.parted(x)
            return self.ranks.summed(self._product(x), self.bias)
        if self.style in styles.COLUMNS and self.copies:
            x = self.ranks.copied(x)
        y = self._product(x, self.bias)
        return self.ranks.joined(y) if self.style == styles.GATHER else y

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x, self.weight, bias)
        if not self.scale:
            return y
        low = linear(x, self.lora_A.weight) * self.scale  # type: ignore[arg-type]
        return y.add_(linear(low, self.lora_B.weight))  # type: ignore[arg-type]


class LatentLinear(CutLinear):
    """Gives latent keys and values, and a rotary key that heads on all ranks use as it is.

    The layers behind the latent ones sum their own gradients (DeepSeek-V2, section 2.1).
    """

    rotary: int  # features of the rotary key, the last ones

    def _of_rows(self, x: Tensor) -> Tensor:
        y = self._product(x, self.bias)
        latent, rotary = y.split((y.shape[1] - self.rotary, self.rotary), 1)
        return torch.cat((latent, self.ranks.copied(rotary)), 1)


class CutEmbedding(nn.Embedding):
    """An Embedding layer, of whose vocabulary a rank has a part.

    With sequence parallelism it gives this rank's rows, as if they were one sequence.
    """

    group: Any  # TensorParallelGroup

    def forward(self, tokens: Tensor) -> Tensor:
        has_own = self.group.sequence_parallel
        rows = tokens.flatten() if has_own else tokens
        x = embed(rows, self.weight, self.group, self.padding_idx)
        return x.unsqueeze(0) if has_own else x


@lru_cache(maxsize=64)
def _under(theirs: Any, plain: Any, ours: Any) -> Any:
    """Returns a family's class with our layer in the place of PyTorch's beneath it."""
    return ours if theirs is plain else type(theirs.__name__, (theirs, ours), {})


def install(
    found: Family,
    part: nn.Module,
    prefix: str,
    parameters: Mapping[str, Parameter],
    group: TensorParallelGroup,
    device: torch.device | str,
    dtype: torch.dtype,
    length: Callable[[], int],
    lora: Lora | None = None,
    experts: ExpertParallelGroup | None = None,
) -> nn.Module:
    """Returns a copy of a part as one rank holds it, with uninitialised parameters.

    parameters: by name in the part; prefix: of its names in the base model; length: tokens of a
    sequence in the pass that runs; experts: the ranks over which experts lie, where these have some
    of them each.
    """
    part = found.copy_of(part)
    cuts = cuts_of(found, prefix, part)
    for name in kept_buffers(part):
        owner, _, leaf = name.rpartition(".")
        delattr(part.get_submodule(owner), leaf)
    with_buffers(found, part, device)
    for name, parameter in parameters.items():
        value = torch.empty(parameter.held_shape(group.size), device=device, dtype=dtype)
        owner, _, leaf = name.rpartition(".")
        if is_added(name):
            layer, _, matrix = owner.rpartition(".")
            part.get_submodule(layer).add_module(matrix, nn.Module())
        held = nn.Parameter(value, requires_grad=parameter.trains)
        setattr(part.get_submodule(owner), leaf, held)
    all_rows: list[AllRows] = []
    if group.sequence_parallel and prefix.startswith(f"{LAYERS}."):
        hidden = found.config.hidden_size
        all_rows = modules_of_all_rows(part, cuts, group, length, hidden)
    for name, module in part.named_modules():
        inside = (each.ranks for each in all_rows if each.holds(name))
        _cut(name, module, cuts, parameters, found, next(inside, GroupCommunication(group)))
        if lora and f"{name}.{A}.weight" in parameters:
            module.scale = lora.scale  # type: ignore[assignment]
    for each in all_rows:
        each.surround()
    if experts is not None:
        spread(part, experts)
    return part


def _cut(
    name: str,
    module: Any,
    cuts: Cuts,
    parameters: Mapping[str, Parameter],
    found: Family,
    ranks: GroupCommunication,
) -> None:
    weight, style = parameters.get(f"{name}.weight".lstrip(".")), cuts.of(name)
    if isinstance(module, nn.Linear) and weight is not None:
        if not name:  # the head, whose vocabulary is cut
            style = None if weight.split_dimension is None else styles.COLUMN
        ours = LatentLinear if style == styles.LATENT else CutLinear
        layer: Any = module
        layer.__class__ = _under(cast(Any, type(module)), nn.Linear, ours)
        layer.ranks, layer.style = ranks, style
        layer.copies = name.rpartition(".")[0] not in cuts.copied
        if style == styles.LATENT:
            layer.rotary = found.config.qk_rope_head_dim
    elif isinstance(module, nn.Embedding) and weight is not None and weight.split_dimension == 0:
        table: Any = module
        table.__class__ = _under(cast(Any, type(module)), nn.Embedding, CutEmbedding)
        table.group = ranks.group
    elif norm := fused(module):
        norm_module: Any = module
        norm_module.epsilon = epsilon_of(module)
        norm_module.__class__ = norm
    if ranks.group.size > 1:
        if name in cuts.copied:
            module.register_forward_pre_hook(_copied_input(ranks), with_kwargs=True)
        elif style == styles.EXPERTS:
            module.index_in_group = ranks.group.index
            module.register_forward_pre_hook(_copied_floats(ranks), with_kwargs=True)
            module.register_forward_hook(lambda _, __, result: ranks.summed(result))
        elif style == styles.SUM:
            module.register_forward_hook(lambda _, __, result: ranks.summed(result))
        elif style == styles.IDENTITY_EXPERT:
            size = ranks.group.size
            module.register_forward_pre_hook(lambda _, given: (given[0] / size, *given[1:]))


def _copied_input(ranks: GroupCommunication) -> Any:
    """Returns a hook that makes a copy for the group of the first argument."""

    def enter(_: nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        if given:
            return (ranks.copied(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": ranks.copied(named["hidden_states"])}

    return enter


def _copied_floats(ranks: GroupCommunication) -> Any:
    """Returns a hook that makes a copy for the group of rows and of their experts' weights."""

    def copied(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return ranks.copied(value) if is_float else value

    def enter(_: nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        return tuple(map(copied, given)), {key: copied(each) for key, each in named.items()}

    return enter
