"""The experts of transformers' modules, each a product over the rows that are routed to it.

It is registered with transformers as a function for experts: its own take no float64, nothing on
meta, or copy an expert's weights for every token.

Where experts lie over ranks, the shared ones of their block run while rows come back from them,
before the block calls them: it is then given what they have made. A block that calls them first
does so before rows leave, and nothing of it is computed meanwhile.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from heteropp.models.parallel.backward import WeightGradients, grouped_linear
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
    x, later = dispatched(x, routes)
    by_expert = routes.by_expert(x.device)
    x = _computed(module, x.index_select(0, by_expert), routes.ends, later)
    meanwhile = getattr(module, "meanwhile", None)
    return returned(x.index_select(0, _inverse(by_expert)), routes, meanwhile)


def _computed(
    module: Any, x: Tensor, ends: tuple[int, ...], later: WeightGradients | None = None
) -> Tensor:
    """Returns what experts make of rows, which stand by expert and end there."""
    first, cut = module.gate_up_proj if module.has_gate else module.up_proj, module.is_transposed
    x = grouped_linear(x, first, _bias(module, "gate_up_proj_bias"), ends, cut, later)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = grouped_linear(x, module.down_proj, _bias(module, "down_proj_bias"), ends, cut, later)
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


def spread(part: nn.Module, group: ExpertParallelGroup) -> None:
    """Has the experts of a part lie over ranks."""
    for block in part.modules():
        found = getattr(block, "experts", None)
        if isinstance(found, nn.Module):
            found.expert_group = group  # type: ignore[assignment]
            shared = getattr(block, "shared_experts", None)
            if shared is not None:
                shared.__class__ = _ahead(cast(Any, type(shared)))
                block.register_forward_pre_hook(shared.note)
                found.meanwhile = shared.run_ahead


@lru_cache(maxsize=64)
def _ahead(theirs: Any) -> Any:
    """Returns a family's class of shared experts, which can run before their block calls them."""
    return type(theirs.__name__, (_Ahead, theirs), {})


class _Ahead(nn.Module):
    """Shared experts of what their block is given, beneath their family's class."""

    given: Tensor | None = None  # to the block, until they have run
    made: Tensor | None = None  # of that, until the block calls them

    def note(self, _: nn.Module, given: tuple) -> None:
        self.given, self.made = given[0] if given else None, None

    def run_ahead(self) -> None:
        if self.given is not None:
            self.made = super().__call__(self.given)
            self.given = None

    def __call__(self, x: Tensor) -> Tensor:
        made, self.given, self.made = self.made, None, None
        return super().__call__(x) if made is None else made
