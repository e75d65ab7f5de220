"""Seconds of operators where a chip's file says how far its kernels stay below the roofline."""

from __future__ import annotations

from heteropp.cost.tracing.traces import TracedPiece, TracedProduct
from heteropp.description.chips import ChipSpec


def kernels_s(piece: TracedPiece, dtype: str, chip: ChipSpec, shards: int = 1) -> float:
    """Returns the seconds of a piece's operators, of which `shards` ranks share the work.

    A product takes its FLOPs at an efficiency that its shortest side decides, and an attention
    kernel its own; all else goes through memory.
    """
    assert chip.kernels is not None
    launch_s, peak = chip.compute.launch_s, chip.peak_flops(dtype) * shards
    bandwidth = chip.memory.bandwidth_bytes_per_s * shards
    moving = bandwidth * chip.kernels.bandwidth_share
    total_s = 0.0
    for number, product, _, size_bytes in piece.operators:
        if not product:
            total_s += number * (launch_s + size_bytes / moving)
    for each in piece.products:
        computing_s = each.flops / (peak * efficiency(each, dtype, chip))
        total_s += each.number * (launch_s + max(computing_s, each.bytes / bandwidth))
    return total_s


def efficiency(product: TracedProduct, dtype: str, chip: ChipSpec) -> float:
    """Returns the share of the peak that a product of matrices, or an attention kernel, reaches."""
    kernels = chip.kernels
    assert kernels is not None
    if product.kind == "attention":
        return kernels.causal_attention_efficiency
    if product.kind == "attention_backward":
        return kernels.causal_attention_backward_efficiency
    return chip.product_efficiency(dtype, min(product.sides[1:]))


def host_s(piece: TracedPiece, chip: ChipSpec) -> float:
    """Returns the seconds in which the host issues a piece's operators and collectives."""
    assert chip.kernels is not None
    messages = *piece.all_reduce_bytes, *piece.gather_bytes, *piece.exchange_bytes
    messages += piece.routed_bytes
    issued = sum(number for number, *_ in (*piece.operators, *messages))
    return chip.kernels.host_s * issued
