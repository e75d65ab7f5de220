"""PyTorch's own ring attention on CPUs: what its context_parallel lacks to take their kernel.

Its ring takes any attention kernel, and it has rules for the kernels of GPUs alone. Here are those
of the CPU's, of the same shape: a way to lay tensors out over ranks, which is cut along the
sequence, and a call of its ring with the kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SEQUENCE = 2  # dimension of [batch, heads, sequence, head size], and of the log-sum-exp


class NoRing(Exception):
    """One sentence."""


@lru_cache
def teach() -> None:
    """Teaches context_parallel the CPU's kernel. Raises NoRing where it cannot be taught.

    What it takes are private names of a prototype, which another torch may not have.
    """
    try:
        _teach()
    except (ImportError, AttributeError) as error:
        raise NoRing(
            f"torch {torch.__version__} has no such ring to give the CPU's kernel to: {error}"
        ) from None


def _teach() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
    from torch.distributed.tensor._ops.utils import (
        expand_to_full_mesh_op_strategy,
        register_op_strategy,
    )
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        _templated_ring_attention,
        _templated_ring_attention_backward,
        custom_ops,
    )

    dispatcher: Any = DTensor._op_dispatcher
    outputs = {FORWARD: 2, BACKWARD: 3}

    def strategy(schema: OpSchema) -> OpStrategy:
        """Returns that all is on every rank, or cut along the sequence."""
        count = outputs[schema.op]
        tensors = count + sum(isinstance(each, OpStrategy) for each in schema.args_schema)
        ways: list[Any] = [[Replicate()] * tensors, [Shard(SEQUENCE)] * tensors]
        mesh = schema.get_mesh_from_args(validate=False)
        return expand_to_full_mesh_op_strategy(mesh, schema, ways, input_index=count)

    def forward(
        group: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, ...]:
        others["dropout_p"] = dropout_p
        return _templated_ring_attention(
            group, SEQUENCE, FORWARD, query, key, value, is_causal, **others
        )

    def backward(
        group: Any,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        **others: Any,
    ) -> tuple[torch.Tensor, ...]:
        others["dropout_p"] = dropout_p
        return _templated_ring_attention_backward(
            group, SEQUENCE, BACKWARD, grad_out, "grad_out", query, key, value, out, logsumexp,
            is_causal, **others,
        )  # fmt: skip

    rules: dict[Any, Any] = custom_ops
    rings: dict[Any, Any] = {FORWARD: forward, BACKWARD: backward}

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        dispatcher.sharding_propagator.propagate(info)
        found = rings[op](args[0].device_mesh.get_group(), *info.local_args, **info.local_kwargs)
        return dispatcher.wrap(found, info.output_sharding.output_spec)

    for op in rings:
        register_op_strategy(op)(strategy)
        rules[op] = handle
