"""Which calls of scaled_dot_product_attention a chip has one causal kernel for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal_inputs(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the query, key and value of such a call, [sequences, heads, length, size] each.

    None: it is another call, or PyTorch takes it apart on every chip.
    """
    return _plainly_causal(*args, **kwargs) if func is scaled_dot_product_attention else None


def _plainly_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Binds a call's arguments as scaled_dot_product_attention does, by place or by name."""
    is_plain = is_causal and attn_mask is None and 0 <= dropout_p < 1
    is_square = query.dim() == 4 and query.shape[-2] == key.shape[-2]
    return (query, key, value) if is_plain and is_square else None
