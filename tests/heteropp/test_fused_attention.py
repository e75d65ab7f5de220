"""A model with fused attention: the same numbers, and a cost without the weights between tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import forks
import pytest
import torch
from clusters import tiny_model
from layouts import lay_out
from parity import TOLERANCE, RankError, Ranks
from pydantic import TypeAdapter
from sampled import sampled
from test_attention_within import LAYOUTS, conversations, learnt_by, plainly
from test_mixed_lengths import check
from tiny_decoders import tiny_config
from training_run import NEUTRAL_CHIP
from training_run import tiny_model as tiny_trained

from heteropp.cost.documents import documents_bytes
from heteropp.cost.planned import rank_memory
from heteropp.cost.tracing.kind import StageKind
from heteropp.cost.tracing.traces import TracedPiece, trace_stage
from heteropp.models.documents import Documents
from heteropp.models.fused_attention import attend
from heteropp.models.hugging_face.reading import read
from heteropp.models.llama.stage import Attention, SharedConstants
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.spec import ModelSpec

MODEL = tiny_model(
    4, hidden=256, heads=8, kv_heads=2, intermediate=512, sequence_length=512, dtype="float64"
)
FUSED = replace(MODEL, attention="fused")


@pytest.mark.parametrize("lengths", [None, (512, 1, 300, 211)], ids=str)
def test_it_computes_what_explicit_attention_does(lengths: tuple[int, ...] | None) -> None:
    """There are two sequences, or documents in them."""
    torch.manual_seed(0)
    documents = None
    if lengths is not None:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        (documents,) = Documents.of_step(numbers.unsqueeze(0), MODEL.sequence_length)
    explicit = Attention(MODEL, SoloGroup(), False, device="cpu", dtype=torch.float64)
    fused = Attention(FUSED, SoloGroup(), False, device="cpu", dtype=torch.float64)
    for parameter in explicit.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    fused.load_state_dict(explicit.state_dict())
    tables, without_mask = (
        SharedConstants(model, torch.device("cpu"), torch.float64).of(None, documents)
        for model in (MODEL, FUSED)
    )
    assert without_mask.seen is documents
    x = torch.randn(2 * MODEL.sequence_length, MODEL.hidden, dtype=torch.float64)
    ours = fused(x, without_mask)
    theirs = explicit(x, tables)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


# tokens, whether documents are kept apart, and a cap of scores
WINDOWS = [(700, True, 0.7), (2048, False, None), (1, True, None), (5000, False, 0.7)]
MORE_WINDOWS = product([1, 700, 2048, 5000], [False, True], [None, 0.7])


@pytest.mark.parametrize(
    ("window", "documents", "soft_cap"),
    sampled(dict.fromkeys([*WINDOWS, *MORE_WINDOWS]), 12, everyday=4),
)
def test_it_looks_through_a_window(window: int, documents: bool, soft_cap: float | None) -> None:
    """Values and gradients, against the definition; the host takes 1024 queries at a time."""
    torch.manual_seed(0)
    length, heads, kv_heads, size = 2500, 2, 1, 4
    shapes = [(1, length, count, size) for count in (heads, kv_heads, kv_heads, heads)]
    *given, gradient = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    number = (torch.arange(length) >= 1200).long() if documents else torch.zeros(length)
    ours, theirs = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    apart = Documents.of_step(number.unsqueeze(0), length)[0] if documents else None
    attend(*ours, window=window, documents=apart, scale=0.7, soft_cap=soft_cap).backward(gradient)
    found = [each.grad for each in ours]

    apart = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (apart >= 0) & (apart < window) & (number.unsqueeze(1) == number)
    query, key, value = (each.transpose(1, 2) for each in theirs)
    scores = query @ key.mT * 0.7
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    (torch.softmax(scores, -1) @ value).backward(gradient.transpose(1, 2))
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-12, atol=1e-12)


def test_a_kernel_is_told_of_few_more_documents_than_there_are() -> None:
    """All micro-batches of as many, a power of two, as the backward takes memory for each."""
    numbers = torch.tensor([[0] * 9 + [1] * 3, [0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 4, -1]])
    few, many = Documents.of_step(numbers, 6)  # two sequences each, where documents end in any case
    assert few.ends.tolist() == [0, 6, 9, 12, 12, 12, 12, 12, 12]
    assert many.ends.tolist() == [0, 5, 6, 8, 9, 10, 11, 12, 12]
    assert few.of_rows.tolist() == [0] * 6 + [1] * 3 + [2] * 3
    assert many.positions(6).tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 0, 0, 0]]


def product_flops(piece: TracedPiece) -> int:
    return sum(number * flops for number, product, flops, _ in piece.operators if product)


@pytest.mark.parametrize("tp", [1, 2])
def test_its_cost(tp: int) -> None:
    """One layer's difference, against arithmetic."""

    def layer(model, what) -> int:
        kind = StageKind("block", False, False, tp, 1)
        return what(trace_stage(model, kind, 2)) - what(trace_stage(model, kind, 1))

    heads, length = MODEL.heads // tp, MODEL.sequence_length
    pairs = heads * length**2  # of tokens, over the heads
    seen = heads * length * (length + 1) // 2  # of these, which are not masked
    saved = layer(MODEL, lambda t: t.kept_bytes) - layer(FUSED, lambda t: t.kept_bytes)
    sums_bytes = MODEL.heads // tp * MODEL.sequence_length * 4
    out_bytes = MODEL.sequence_length * MODEL.hidden // tp * 8
    assert saved == pytest.approx(pairs * 8 - sums_bytes, abs=2 * out_bytes)
    of_weights = set()  # products with them, which are the same
    for model, products, computed in ((MODEL, 4, pairs), (FUSED, 5, seen)):
        product = 2 * computed * MODEL.head_size
        plain = layer(model, lambda t: product_flops(t.forward)) - 2 * product
        of_weights.add(plain)
        whole = layer(
            model, lambda t: product_flops(t.backward_input) + product_flops(t.backward_weight)
        )
        assert whole == 2 * plain + products * product
    assert len(of_weights) == 1


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


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("schedule", "layout", "dtype"),
    [
        ("1f1b", "tp 1 to 4", "float64"),
        pytest.param("zb-v", "three pipelines", "float64", marks=pytest.mark.long),
        pytest.param("chimera", "sequence parallel, dropout", "float64", marks=EXHAUSTIVE),
        pytest.param("1f1b", "figure 8", "float32", marks=EXHAUSTIVE),
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


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("unlike stages", "float64"), pytest.param("two pipelines", "float32", marks=EXHAUSTIVE)],
)
def test_documents_train_what_each_alone_does(
    chips: Ranks, tmp_path: Path, layout: str, dtype: str
) -> None:
    """The chips' kernel is told where documents end, and no mask is made of them."""
    data = conversations(tmp_path / "chats.tokens", 160, 21)
    plan = LAYOUTS[layout](tiny_trained(layers=8, dtype=dtype))
    fused = replace(plan, model=replace(plan.model, attention="fused"))
    check(learnt_by(chips, fused, data), plainly(plan, data), TOLERANCE[dtype])


STRICT = """
import sys, torch, ditorch
from pydantic import TypeAdapter
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.documents import Documents
from heteropp.models.spec import ModelSpec
for text in sys.argv[1:]:
    model = TypeAdapter(ModelSpec).validate_json(text)
    stage = model.build((0, 2), SoloGroup(), "device", torch.float32)
    stage.initialise(0)
    tokens = torch.zeros(64, dtype=torch.int64, device="device")
    numbers = torch.tensor([[0] * 10 + [1] * 22 + [0] * 31 + [-1]])
    (documents,) = Documents.of_step(numbers, 32, "device")
    stage(tokens, tokens, 0, documents).backward()
print(ditorch.kernel_counts()["_flash_attention_backward"], ditorch.fallback_counts())
"""


def test_the_host_computes_nothing_of_it() -> None:
    """The models have 2 layers each, and documents; others than the first windows, too.

    The last has a soft cap.
    """
    sizes = dict(hidden=64, vocab=256, sequence_length=32)
    models = [
        replace(tiny_model(2, **sizes), attention="fused"),
        *(
            read(
                tiny_config(family, layers=2).to_dict(), "x", sequence_length=32, attention="fused"
            )
            for family in ("mistral", "gemma2")
        ),
    ]
    texts = (TypeAdapter(ModelSpec).dump_json(model).decode() for model in models)
    strict = {**os.environ, "DITORCH_CHIP": "c-mini", "DITORCH_STRICT": "1"}
    done = forks.run(["-c", STRICT, *texts], strict, timeout_s=120)
    assert done.stdout == "6 {}\n", done.stderr[-3000:]


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_flops_are_those_of_pairs_that_are_seen(family: str) -> None:
    """Gemma 2 has a soft cap, which is no product, and every second layer sees all."""
    values, length = tiny_config(family, layers=2).to_dict(), 32
    model = read(values, "x", sequence_length=length)
    windows = [values["sliding_window"], length if family == "gemma2" else values["sliding_window"]]
    pairs = sum(min(row + 1, window) for row in range(length) for window in windows)
    products = 3 * 2 * 2 * values["num_attention_heads"] * values["head_dim"]
    masked = products * (2 * length**2 - pairs) / length
    fused = replace(model, attention="fused")
    assert model.flops_per_token() - fused.flops_per_token() == pytest.approx(masked, rel=1e-12)


@pytest.mark.long
def test_what_keeps_documents_apart_is_within_the_predicted(chips: Ranks, tmp_path: Path) -> None:
    data = conversations(tmp_path / "chats.tokens", 400, 60)
    plan = LAYOUTS["one rank"](tiny_trained(layers=8, dtype="float32", sequence_length=128))
    needs = {}
    for attention in ("explicit", "fused"):
        own = replace(plan, model=replace(plan.model, attention=attention))
        (memory,) = rank_memory(own)
        needs[attention] = memory.total + documents_bytes(own, 0)
        (peak,) = learnt_by(chips, own, data, steps=3).peak_memory_bytes
        assert 0.9 * needs[attention] <= peak <= needs[attention], attention
    assert needs["fused"] < needs["explicit"]


@pytest.mark.long
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
