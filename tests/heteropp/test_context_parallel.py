"""Sequences cut over ranks in equal and unequal parts train what one process trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from clusters import cluster_of
from layouts import MINISTAGES, SCHEDULES, plan_of, scheduled, two_pipelines
from parity import STEPS, TOLERANCE, RankError, Ranks
from sampled import sampled
from test_attention_within import conversations, learnt_by
from test_attention_within import plainly as learnt_plainly
from test_gpt2 import tiny as tiny_gpt2
from test_hugging_face_training import Decoder, compare
from test_memory import SIZES, chip
from test_memory import check as check_memory
from test_mixed_lengths import check as check_learnt
from test_parity import check
from tiny_decoders import tiny_config, write_folder
from training_run import tiny_model

from ditorch.chips import load_chip
from heteropp import token_shares
from heteropp.cost.tracing.kind import StageKind
from heteropp.cost.tracing.traces import trace_stage
from heteropp.description.plan import (
    Plan,
    PlanError,
    Schedule,
    Stage,
    read_plan,
    validate,
    write_plan,
)
from heteropp.frameworks.file import ExportError
from heteropp.frameworks.one_pipeline import single_pipeline
from heteropp.models.documents import Documents
from heteropp.models.fused_attention import attend
from heteropp.models.hugging_face.model import CUTTABLE
from heteropp.models.hugging_face.reading import read
from heteropp.models.llama.model import LlamaModel
from heteropp.runtime.mixed_lengths.plans import by_length
from heteropp.simulator.expectation import ExpectedStep
from heteropp.simulator.simulate import Simulation, simulate

Shares = Sequence[int]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Chips compute with kernels of their own, exactly enough."""
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


def cut(plan: Plan, shares: dict[int, Sequence[Shares]]) -> Plan:
    """Some stages of the first pipeline with context parallelism, with the shares of each replica,
    or one for all.
    """
    first, *others = plan.pipelines
    stages = list(first.stages)
    for s, given in shares.items():
        replicas = stages[s].replicas
        every = given if len(given) > 1 else list(given) * len(replicas)
        pairs = zip(replicas, every, strict=True)
        stages[s] = replace(
            stages[s], replicas=tuple(replace(r, token_shares=tuple(own)) for r, own in pairs)
        )
    return replace(plan, pipelines=(replace(first, stages=tuple(stages)), *others))


LAYOUTS: dict[str, Callable[[LlamaModel], Plan]] = {
    "equal": lambda m: cut(plan_of(m, (8,), (1,), (2,)), {0: [(8, 8)]}),
    "unequal, then none": lambda m: cut(plan_of(m, (5, 3), (1, 1), (3, 1)), {0: [(8, 5, 3)]}),
    "none, then unequal with tp": lambda m: cut(plan_of(m, (4, 4), (1, 1), (1, 4)), {1: [(10, 6)]}),
    "unlike parts in replicas, ZeRO-2": lambda m: cut(
        plan_of(m, (4, 4), (2, 1), (2, 3), shares={0: (1, 3)}, zero_stage=2),
        {0: [(9, 7), (4, 12)], 1: [(1, 2, 13)]},
    ),
    "sequence parallel, dropout": lambda m: cut(
        plan_of(replace(m, dropout=0.2), (4, 4), (1, 1), (4, 2), sequence_parallel=True),
        {0: [(10, 6)]},
    ),
    "dropout, ZeRO-0": lambda m: cut(
        plan_of(replace(m, dropout=0.2), (4, 4), (1, 1), (1, 2), zero_stage=0), {1: [(11, 5)]}
    ),
    "selective recompute, smaller micro-batch": lambda m: cut(
        plan_of(m, (4, 4), (1, 1), (2, 2), shares={1: (2,)}, selective_recompute=True),
        {0: [(11, 5)], 1: [(3, 13)]},
    ),
    "broadcast": lambda m: cut(
        replace(plan_of(m, (4, 4), (1, 1), (2, 4)), resharding="broadcast"), {1: [(6, 10)]}
    ),
    "direct": lambda m: cut(
        replace(plan_of(m, (4, 4), (2, 1), (1, 4)), resharding="direct"), {1: [(6, 10)]}
    ),
    "four parts": lambda m: cut(
        plan_of(m, (5, 3), (1, 1), (4, 4)), {0: [(4, 4, 4, 4)], 1: [(6, 5, 3, 2)]}
    ),
    "tied, two pipelines": lambda m: cut(
        two_pipelines(replace(m, tied_embeddings=True)), {1: [(9, 7)]}
    ),
}


EVERYDAY = {  # of layouts, what they are tried with every day
    "unequal, then none": ("float64", "explicit"),
    "unlike parts in replicas, ZeRO-2": ("float32", "fused"),
}
ON_CI = (
    *("sequence parallel, dropout", "selective recompute, smaller micro-batch"),
    *("direct", "tied, two pipelines"),
)


def lay_out(name: str, dtype: str, **changes: object) -> Plan:
    return LAYOUTS[name](tiny_model(layers=8, dtype=dtype, **changes))


def marks(layout: str, dtype: str, attention: str) -> tuple[pytest.MarkDecorator, ...]:
    """Each layout that CI runs is tried in one way."""
    if layout in EVERYDAY:
        return () if EVERYDAY[layout] == (dtype, attention) else (pytest.mark.exhaustive,)
    turn = list(LAYOUTS).index(layout) % 2
    own = ("float64", "explicit") if turn or "selective" in layout else ("float32", "fused")
    on_ci = layout in ON_CI and own == (dtype, attention)
    return (pytest.mark.long if on_ci else pytest.mark.exhaustive,)


@pytest.mark.parametrize(
    ("layout", "dtype", "attention"),
    [
        pytest.param(*case, marks=marks(*case))
        for case in product(LAYOUTS, ("float64", "float32"), ("explicit", "fused"))
        if "selective" not in case[0] or case[2] == "explicit"
    ],
)
def test_it_trains_what_one_process_does(
    ranks: Ranks, layout: str, dtype: str, attention: str
) -> None:
    plan = lay_out(layout, dtype, attention=attention)
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE[dtype])


def of_schedule(schedule: Schedule, model: LlamaModel) -> Plan:
    plan = plan_of(model, (4, 4), (1, 1), (2, 3))
    plan = scheduled(plan, schedule, MINISTAGES.get(schedule, 1))
    return cut(plan, {0: [(10, 6)], 1: [(8, 5, 3)]})


@pytest.mark.parametrize(
    "schedule",
    sampled(["zb-h1", *(s for s in SCHEDULES if s != "zb-h1")], 4),
)
def test_every_schedule(ranks: Ranks, schedule: Schedule) -> None:
    """The second stage recomputes."""
    plan = of_schedule(schedule, tiny_model(layers=8, dtype="float64", attention="fused"))
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("layout", "attention"),
    [
        ("unlike parts in replicas, ZeRO-2", "fused"),
        pytest.param("unlike parts in replicas, ZeRO-2", "explicit", marks=pytest.mark.exhaustive),
        pytest.param("sequence parallel, dropout", "fused", marks=pytest.mark.exhaustive),
        pytest.param("sequence parallel, dropout", "explicit", marks=pytest.mark.long),
        pytest.param(
            "selective recompute, smaller micro-batch", "explicit", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_documents_that_are_cut_train_what_each_alone_does(
    ranks: Ranks, tmp_path: Path, layout: str, attention: str
) -> None:
    data = conversations(tmp_path / "chats.tokens", 160, 21)
    plan = lay_out(layout, "float64", attention=attention)
    got = learnt_by(ranks, plan, data)
    check_learnt(got, learnt_plainly(plan, data), TOLERANCE["float64"])


@pytest.mark.long
def test_a_run_goes_on_from_its_checkpoint_under_other_parts(ranks: Ranks, tmp_path: Path) -> None:
    """One stage follows on two, and one rank on that."""
    plans = [lay_out("equal", "float64"), lay_out("unequal, then none", "float64")]
    alone = plan_of(plans[0].model, (8,), (1,), (1,))
    losses = [
        loss
        for steps, plan in ((2, plans[1]), (4, plans[0]), (STEPS, alone))
        for loss in ranks.train(plan, steps, checkpoints=tmp_path).losses
    ]
    assert losses == pytest.approx(ranks.plainly(alone).losses, rel=TOLERANCE["float64"])


# ---------------------------------------------------------------- families of transformers


@pytest.mark.parametrize(
    ("family", "attention"),
    sampled(
        [
            ("qwen3", "fused"),
            *(
                (f, a)
                for f in CUTTABLE
                for a in ("explicit", "fused")
                if (f, a) != ("qwen3", "fused")
            ),
        ],
        10,
        everyday=1,
    ),
)
def test_families_of_transformers(
    ranks: Ranks, tmp_path: Path, family: str, attention: str
) -> None:
    """Some have layers that look through a window, experts, sinks or latent attention."""
    folder = tmp_path / family
    write_folder(folder, family, noise=0.05, layers=4)
    values = json.loads((folder / "config.json").read_text())
    model = read(values, family, sequence_length=32, attention=attention)
    plan = cut(plan_of(model, (2, 2), (1, 1), (2, 4)), {0: [(20, 12)], 1: [(14, 18)]})
    compare(ranks, plan, Decoder(model, folder))


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_documents_that_are_cut_in_a_family_of_transformers(
    ranks: Ranks, tmp_path: Path, attention: str
) -> None:
    """Parts train what one rank does, which other tests hold against each document alone."""
    values = tiny_config("qwen3", layers=4).to_dict()
    model = read(values, "qwen3", sequence_length=16, dtype="float64", attention=attention)
    data = conversations(tmp_path / "chats.tokens", 160, 21)
    alone = learnt_by(ranks, plan_of(model, (4,), (1,), (1,)), data)
    plan = cut(plan_of(model, (2, 2), (1, 1), (2, 3)), {0: [(10, 6)], 1: [(8, 5, 3)]})
    check_learnt(learnt_by(ranks, plan, data), alone, TOLERANCE["float64"])


def test_what_of_transformers_is_not_cut_is_one_sentence() -> None:
    def problem(**changes: object) -> str:
        values = tiny_config(str(changes.pop("family", "llama")), layers=2).to_dict() | changes
        return str(read(values, "x", sequence_length=32).context_parallel_problem())

    assert problem() == "None"
    assert "sequences of olmo2 cannot be cut over ranks; those of llama" in problem(family="olmo2")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "a part has others" in problem(rope_parameters=dynamic)


# ---------------------------------------------------------------- attention of the last tokens


@pytest.mark.parametrize("window", [None, 1, 700])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("first", [900, 2400])
def test_the_last_tokens_attend_as_those_of_a_whole_sequence_do(
    first: int, documents: bool, window: int | None
) -> None:
    """Values and gradients, against the definition."""
    torch.manual_seed(0)
    sequences, length, heads, kv_heads, size = 2, 2500, 2, 1, 4
    shapes = [(length - first, heads), (length, kv_heads), (length, kv_heads)]
    given = [torch.randn(sequences, *shape, size, dtype=torch.float64) for shape in shapes]
    gradient = torch.randn_like(given[0])
    number = torch.zeros(sequences, length)
    number[0, 1200:], number[1, 2450:] = 1, 1
    ours, theirs = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    apart = Documents.of_step(number.view(1, -1), length, first=first)[0] if documents else None
    attend(*ours, window=window, documents=apart, scale=0.7).backward(gradient)

    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    if documents:
        seen = seen & (number.unsqueeze(2) == number.unsqueeze(1)).unsqueeze(1)
    query, key, value = (each.transpose(1, 2) for each in theirs)
    scores = (query @ key.mT * 0.7).masked_fill(~seen[..., first:, :], -torch.inf)
    (torch.softmax(scores, -1) @ value).backward(gradient.transpose(1, 2))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_numbers_of_a_row_of_the_last_tokens_may_lie_apart() -> None:
    shapes = (10, 4), (30, 2), (30, 2)
    apart = [torch.randn(2, *shape, 8).mT.contiguous().mT for shape in shapes]
    gradient = torch.randn(2, 10, 4, 8)
    found = []
    for given in (apart, [each.contiguous() for each in apart]):
        tensors = [each.detach().requires_grad_() for each in given]
        attend(*tensors).backward(gradient.mT.contiguous().mT if given is apart else gradient)
        found.append([each.grad for each in tensors])
    assert all(each.stride(-1) > 1 for each in apart)
    torch.testing.assert_close(*found)


# ---------------------------------------------------------------- what it costs


def sized(attention: str) -> LlamaModel:
    return tiny_model(**SIZES, attention=attention)


MEASURED: dict[str, Callable[[LlamaModel], Plan]] = {
    "unequal, then none": lambda m: cut(plan_of(m, (5, 3), (1, 1), (3, 1)), {0: [(16, 10, 6)]}),
    "with tp, zb-h1": lambda m: scheduled(
        cut(plan_of(m, (4, 4), (1, 1), (2, 4), sequence_parallel=True), {1: [(20, 12)]}),
        "zb-h1",
        1,
    ),
    "unlike parts in replicas, zb-v": lambda m: scheduled(
        cut(
            plan_of(m, (4, 4), (2, 1), (2, 2), shares={0: (1, 3)}),
            {0: [(18, 14), (8, 24)], 1: [(20, 12)]},
        ),
        "zb-v",
        2,
    ),
}


@pytest.mark.parametrize(
    ("name", "attention"),
    sampled(product(MEASURED, ("fused", "explicit")), 6, everyday=1),
)
def test_a_peak_is_within_5_percent_below_the_predicted(
    chips: Ranks, name: str, attention: str
) -> None:
    check_memory(chips, MEASURED[name](sized(attention)))


def test_the_simulator_waits_for_the_slowest_part() -> None:
    """Parts that share the causal work are faster than equal ones, and the exchange is charged."""
    model = tiny_model(sequence_length=2048, hidden=64, attention="fused")

    def simulated(shares: Shares | None, bandwidth: float = 1e9) -> Simulation:
        chip = load_chip("a-mini")
        chip = replace(chip, links=replace(chip.links, intra_node_bytes_per_s=bandwidth))
        plan = plan_of(model, (4,), (1,), (2 if shares else 1,))
        plan = cut(plan, {0: [shares]}) if shares else plan
        return simulate(plan, cluster_of(("x", chip, plan.world_size)))

    alone, equal = simulated(None).step_s, simulated((1024, 1024))
    shares = token_shares(model, (1, 1))
    unequal = simulated(shares)
    assert alone / 2 < unequal.step_s < equal.step_s < alone
    # keys and values of the first part, in float32, sent there and their gradients back
    tokens, passes = shares[0] * 4, 2 * model.layers * 4  # of a micro-batch, and of four of those
    exchanged = tokens * passes * 2 * model.kv_heads * model.head_size * 4
    slower_s = simulated(shares, 1e6).step_s - simulated(shares, 1e7).step_s
    assert exchanged <= slower_s / (1 / 1e6 - 1 / 1e7) < 1.05 * exchanged
    first, second = equal.memory_bytes
    assert first < second  # whose keys and values are of all tokens
    ((rank, held),) = ExpectedStep(equal).memory.items()
    assert rank == 1 and max(size for _, size in held) == second


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_part_is_charged_the_pairs_that_it_sees(index: int) -> None:
    """A forward has two products a pair, and a backward, which scores anew, five."""
    shares, first = (64, 40, 24), (0, 64, 104)[index]
    model = tiny_model(sequence_length=128, attention="fused")
    kind = StageKind("block", False, False, 1, 1, token_shares=shares, cp_index=index)
    trace = trace_stage(model, kind, 1)
    pairs = sum(token + 1 for token in range(first, first + shares[index]))
    for products, piece in ((2, trace.forward), (5, trace.backward_input)):
        found = sum(p.number * p.flops for p in piece.products if p.kind.startswith("attention"))
        assert found == products * 2 * model.heads * model.head_size * pairs


# ---------------------------------------------------------------- plans


def test_a_plan_without_it_is_written_as_before(tmp_path: Path) -> None:
    plan = plan_of(tiny_model(), (4,), (1,), (2,))
    write_plan(plan, tmp_path / "plan.json")
    assert "token_shares" not in (tmp_path / "plan.json").read_text()
    parted = cut(plan, {0: [(9, 7)]})
    write_plan(parted, tmp_path / "parted.json")
    assert read_plan(tmp_path / "parted.json") == parted


@pytest.mark.parametrize(
    ("ranks", "shares", "said"),
    [
        ((2,), (16,), "token_shares is [16]; expected at least two, or none at all"),
        ((2,), (), "token_shares is []; expected at least two, or none at all"),
        ((2,), (16, 0), "above 0 that sum to the model's sequence_length 16"),
        ((2,), (10, 5), "above 0 that sum to the model's sequence_length 16"),
        ((3,), (10, 6), "has 3 ranks for 2 token_shares; expected a multiple of them"),
        ((4,), (9, 7), "tensor-parallel degree 2 does not divide a share of 9 tokens"),
    ],
)
def test_bad_parts_are_one_sentence(ranks: Shares, shares: Shares, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        validate(cut(plan_of(tiny_model(), (4,), (1,), ranks), {0: [shares]}))
    assert str(raised.value).startswith("pipelines[0].stages[0].replicas[0]")
    assert said in str(raised.value)


def test_what_does_not_go_with_it_yet_is_one_sentence() -> None:
    model = tiny_model()
    plan = cut(plan_of(model, (4,), (1,), (2,)), {0: [(9, 7)]})
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages

    def refused(stage: Stage) -> str:
        with pytest.raises(PlanError) as raised:
            validate(replace(plan, pipelines=(replace(pipeline, stages=(stage,)),)))
        return str(raised.value)

    assert "offload does not go with token_shares" in refused(replace(stage, offload=True))
    (replica,) = stage.replicas
    other = replace(replica, ranks=(2, 3), token_shares=None)
    unlike = replace(stage, replicas=tuple(replace(r, batch_share=2) for r in (replica, other)))
    assert "replicas[1] has context-parallel degree 1 and replicas[0] 2" in refused(unlike)
    with pytest.raises(PlanError, match="of family gpt2 cannot be cut over ranks; those of llama"):
        validate(replace(plan, model=tiny_gpt2()))
    with pytest.raises(PlanError, match="mixed lengths do not go with context parallelism yet"):
        by_length([plan, replace(plan_of(tiny_model(sequence_length=32), (4,), (1,), (2,)))])
    with pytest.raises(ExportError, match="no framework that plans are written for has such"):
        single_pipeline(plan)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("unequal, then none", "float64"),
        pytest.param("none, then unequal with tp", "float32", marks=pytest.mark.long),
        pytest.param("sequence parallel, dropout", "float64", marks=pytest.mark.exhaustive),
    ],
)
def test_chips_attend_in_two_kernels(chips: Ranks, layout: str, dtype: str) -> None:
    """One is of the tokens before, and one of a part's own, as they know squares alone."""
    plan = lay_out(layout, dtype, attention="fused")
    check(chips.train(plan), chips.plainly(plan), TOLERANCE[dtype])


STRICT = """
import torch, ditorch
from heteropp.models.fused_attention import attend
shapes = (2, 40, 4, 16), (2, 100, 2, 16), (2, 100, 2, 16)
query, key, value = (torch.rand(shape).to("device").requires_grad_() for shape in shapes)
attend(query, key, value).sum().backward()
print(ditorch.kernel_counts()["_flash_attention_backward"], ditorch.fallback_counts())
"""


def test_the_host_computes_nothing_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STRICT],
        env={**os.environ, "DITORCH_CHIP": "c-mini", "DITORCH_STRICT": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "2 {}\n", done.stderr[-3000:]


def test_documents_in_fused_attention_on_chips_are_refused_in_one_sentence(tmp_path: Path) -> None:
    plan = cut(plan_of(tiny_model(attention="fused"), (4,), (1,), (2,)), {0: [(9, 7)]})
    data = conversations(tmp_path / "chats.tokens", 160, 21)
    found = Ranks(chip(tmp_path, 1 << 30))
    with pytest.raises(RankError, match="has token_shares or token_slices, for which chips"):
        learnt_by(found, plan, data)
