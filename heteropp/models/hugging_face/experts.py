"""The experts of transformers' modules, each a product over the rows that are routed to it.

It is registered with transformers as a function for experts: its own take no float64, nothing on
meta, or copy an expert's weights for every token.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from heteropp.models.parallel.backward import grouped_linear
from heteropp.models.parallel.expert_parallel import (
    ExpertParallelGroup,
    Routes,
    by_rank,
    dispatched,
    returned,
)

NAME = "heteropp"


def experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns what each row's experts make of it, weighed, [rows, hidden].

    hidden_states: [rows, hidden]; top_k_index and top_k_weights: [rows, experts of a row].
    """
    each = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    group: ExpertParallelGroup | None = getattr(module, "expert_group", None)
    numbers = chosen if group is None else by_rank(chosen, group)
    order = torch.argsort(numbers, stable=True)  # rows of one expert stand together
    x = hidden_states.index_select(0, order // each)
    if group is None:
        x = _computed(module, x, _ends(chosen, module.num_experts))
    else:
        x = _computed_where_experts_are(module, x, chosen, group)
    x = x * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    x = x.index_select(0, _inverse(order)).view(-1, each, x.shape[-1]).sum(1)
    return x.to(hidden_states.dtype)


def _computed_where_experts_are(
    module: Any, x: Tensor, chosen: Tensor, group: ExpertParallelGroup
) -> Tensor:
    routes = Routes(group, group.counts(chosen, module.num_experts, module.expert_layer))
    x = dispatched(x, routes)
    by_expert = routes.by_expert(x.device)
    x = _computed(module, x.index_select(0, by_expert), routes.ends)
    return returned(x.index_select(0, _inverse(by_expert)), routes)


def _computed(module: Any, x: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Returns what experts make of rows, which stand by expert and end there."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    x = grouped_linear(x, first, _bias(module, "gate_up_proj_bias"), ends, module.is_transposed)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    bias = _bias(module, "down_proj_bias")
    x = grouped_linear(x, module.down_proj, bias, ends, module.is_transposed)
    return module.post_expert_norm(x) if module.has_post_expert_norm else x


def _inverse(order: Tensor) -> Tensor:
    """Returns where each row stands in an order."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _ends(chosen: Tensor, experts: int) -> tuple[int, ...]:
    """Returns where each expert's rows end, from 0 on. On meta every expert has its even share."""
    if chosen.is_meta:
        return tuple(len(chosen) * i // experts for i in range(experts + 1))
    return (0, *accumulate(torch.bincount(chosen, minlength=experts).tolist()))


def _bias(module: Any, name: str) -> Tensor | None:
    """Returns an expert's bias; of several ranks that sum their results the first one adds it."""
    bias: Tensor | None = getattr(module, name, None)
    is_summed = name == "down_proj_bias"
    return None if is_summed and getattr(module, "index_in_group", 0) > 0 else bias
