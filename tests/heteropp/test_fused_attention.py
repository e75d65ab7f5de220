"""A model with fused attention: the same numbers, and a cost without the weights between tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clusters import tiny_model
from layouts import lay_out
from parity import TOLERANCE, RankError, Ranks
from training_run import NEUTRAL_CHIP

from heteropp.cost.planned import rank_memory
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
    assert SharedConstants(FUSED, torch.device("cpu"), torch.float64).mask is None
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


@pytest.fixture(scope="module")
def chip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chip with kernels of its own, for which a fused attention is one."""
    path = tmp_path_factory.mktemp("chip") / "own.toml"
    own = NEUTRAL_CHIP.replace("neutral = true", "neutral = false")
    path.write_text(own.format(chips_per_node=16, capacity_bytes=1 << 30))
    return path


@pytest.fixture(scope="module")
def chips(chip: Path) -> Iterator[Ranks]:
    found = Ranks(chip)
    yield found
    found.close()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("schedule", "layout", "dtype"),
    [
        ("1f1b", "tp 1 to 4", "float64"),
        pytest.param("zb-v", "three pipelines", "float64", marks=LONG),
        pytest.param("chimera", "sequence parallel, dropout", "float64", marks=LONG),
        pytest.param("1f1b", "figure 8", "float32", marks=LONG),
    ],
)
def test_it_trains_what_explicit_attention_does(
    chips: Ranks, schedule: str, layout: str, dtype: str
) -> None:
    """The plain loop keeps scores, on the host; the chips' kernel keeps none."""
    plan = lay_out(layout, schedule, dtype)
    assert plan is not None
    plan = replace(plan, model=replace(plan.model, attention="fused"))
    got, plain = chips.train(plan), chips.plainly(plan)
    assert got.losses == pytest.approx(plain.losses, rel=TOLERANCE[dtype])
    assert got.norms == pytest.approx(plain.norms, rel=TOLERANCE[dtype])
    for name, expected in plain.parameters.items():
        error = (got.parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.3g}"


def test_its_peak_is_within_5_percent_below_the_predicted(chips: Ranks) -> None:
    plan = lay_out("two stages", "1f1b", "float32")
    assert plan is not None
    model = replace(plan.model, sequence_length=128, hidden=64, intermediate=128)
    peaks = {}
    for attention in ("explicit", "fused"):
        own = replace(plan, model=replace(model, attention=attention))
        peaks[attention] = chips.train(own, 3).peak_memory_bytes
        for rank, (peak, memory) in enumerate(zip(peaks[attention], rank_memory(own), strict=True)):
            assert 0.95 * memory.total <= peak <= memory.total, (attention, rank)
    assert all(f < e for f, e in zip(peaks["fused"], peaks["explicit"], strict=True))


def test_a_chip_that_would_keep_its_scores_is_refused(tmp_path: Path) -> None:
    neutral = tmp_path / "neutral.toml"
    neutral.write_text(NEUTRAL_CHIP.format(chips_per_node=16, capacity_bytes=1 << 30))
    plan = lay_out("two stages", "1f1b", "float32")
    assert plan is not None
    plan = replace(plan, model=replace(plan.model, attention="fused"))
    chips = Ranks(neutral)
    with pytest.raises(RankError, match=r"attention is fused, for which chip .* has no kernel"):
        chips.train(plan, 1)
