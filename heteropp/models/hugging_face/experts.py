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

NAME = "heteropp"


def experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns what each row's experts make of it, weighed, [rows, hidden].

    hidden_states: [rows, hidden]; top_k_index and top_k_weights: [rows, experts of a row].
    """
    each = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    order = torch.argsort(chosen, stable=True)  # rows of one expert stand together
    ends = _ends(chosen, module.num_experts)
    x = hidden_states.index_select(0, order // each)
    first = module.gate_up_proj if module.has_gate else module.up_proj
    x = grouped_linear(x, first, _bias(module, "gate_up_proj_bias"), ends, module.is_transposed)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    bias = _bias(module, "down_proj_bias")
    x = grouped_linear(x, module.down_proj, bias, ends, module.is_transposed)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    x = x.index_select(0, back).view(-1, each, x.shape[-1]).sum(1)
    return x.to(hidden_states.dtype)


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
