"""A model with fused attention: the same numbers, and a cost without the weights between tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from clusters import tiny_model

from heteropp.cost.tracing.kind import StageKind
from heteropp.cost.tracing.traces import TracedPiece, trace_stage
from heteropp.models.llama.stage import Attention, SharedConstants
from heteropp.models.parallel.tensor_parallel import SoloGroup

MODEL = tiny_model(
    4, hidden=256, heads=8, kv_heads=2, intermediate=512, sequence_length=512, dtype="float64"
)
FUSED = replace(MODEL, attention="fused")


def test_it_computes_what_explicit_attention_does() -> None:
    torch.manual_seed(0)
    explicit = Attention(MODEL, SoloGroup(), False, device="cpu", dtype=torch.float64)
    fused = Attention(FUSED, SoloGroup(), False, device="cpu", dtype=torch.float64)
    for parameter in explicit.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    fused.load_state_dict(explicit.state_dict())
    tables = SharedConstants(MODEL, torch.device("cpu"), torch.float64)
    x = torch.randn(2 * MODEL.sequence_length, MODEL.hidden, dtype=torch.float64)
    ours, theirs = (each(x, tables, tables.mask) for each in (fused, explicit))
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def product_flops(piece: TracedPiece) -> int:
    return sum(number * flops for number, product, flops, _ in piece.operators if product)


@pytest.mark.parametrize("tp", [1, 2])
def test_its_cost(tp: int) -> None:
    """One layer's difference, against arithmetic."""

    def layer(model, what) -> int:
        kind = StageKind("block", False, False, tp, 1)
        return what(trace_stage(model, 2, kind)) - what(trace_stage(model, 1, kind))

    pairs = MODEL.heads // tp * MODEL.sequence_length**2  # of tokens, over the heads
    saved = layer(MODEL, lambda t: t.kept_bytes) - layer(FUSED, lambda t: t.kept_bytes)
    sums_bytes = MODEL.heads // tp * MODEL.sequence_length * 4
    out_bytes = MODEL.sequence_length * MODEL.hidden // tp * 8
    assert saved == pytest.approx(pairs * 8 - sums_bytes, abs=2 * out_bytes)
    product = 2 * pairs * MODEL.head_size
    assert layer(FUSED, lambda t: product_flops(t.forward)) == layer(
        MODEL, lambda t: product_flops(t.forward)
    )
    for model, products in ((MODEL, 4), (FUSED, 5)):
        plain = layer(model, lambda t: product_flops(t.forward)) - 2 * product
        whole = layer(
            model, lambda t: product_flops(t.backward_input) + product_flops(t.backward_weight)
        )
        assert whole == 2 * plain + products * product
