"""Micro-batches that run slice by slice train what one process trains with whole sequences."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from clusters import cluster_of
from layouts import plan_of, scheduled, two_pipelines
from parity import STEPS, TOLERANCE, Ranks
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
from training_run import make_plan, tiny_model
from typer.testing import CliRunner

from ditorch.chips import load_chip
from heteropp.board.trace import read_trace
from heteropp.cli.search import app
from heteropp.cost.capacity import fits
from heteropp.cost.token_shares import token_shares
from heteropp.cost.tracing.kind import StageKind
from heteropp.cost.tracing.slices import record_slice
from heteropp.cost.tracing.stage import record_stage
from heteropp.description.chrome_trace import write_chrome_trace
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.plan import (
    Plan,
    PlanError,
    Schedule,
    read_plan,
    validate,
    write_plan,
)
from heteropp.description.timeline import Span
from heteropp.elastic.replanning.replan import replan
from heteropp.frameworks.file import ExportError
from heteropp.frameworks.one_pipeline import single_pipeline
from heteropp.models.hugging_face.model import CUTTABLE
from heteropp.models.hugging_face.reading import read
from heteropp.models.llama.model import LlamaModel
from heteropp.runtime.mixed_lengths.plans import by_length
from heteropp.schedule.flows import flows, sent_bytes, slices_by_rank
from heteropp.schedule.stage_actions import actions
from heteropp.search.judge import ask
from heteropp.search.planner import Request
from heteropp.simulator.simulate import Simulation, simulate


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def sliced(plan: Plan, *slices: tuple[int, ...] | None) -> Plan:
    """The same with the slices of each pipeline, or of all."""
    every = slices if len(slices) > 1 else slices * len(plan.pipelines)
    pairs = zip(plan.pipelines, every, strict=True)
    return replace(plan, pipelines=tuple(replace(p, token_slices=own) for p, own in pairs))


# in all of them the second stage recomputes
LAYOUTS: dict[str, Callable[[LlamaModel], Plan]] = {
    "two equal": lambda m: sliced(plan_of(m, (4, 4), (1, 1), (1, 1)), (8, 8)),
    "two unequal": lambda m: sliced(plan_of(m, (5, 3), (1, 1), (1, 1)), (11, 5)),
    "four equal": lambda m: sliced(plan_of(m, (4, 4), (1, 1), (1, 1)), (4,) * 4),
    "four unequal, three stages": lambda m: sliced(
        plan_of(m, (3, 3, 2), (1, 1, 1), (1, 1, 1)), (7, 5, 3, 1)
    ),
    "one stage": lambda m: sliced(plan_of(m, (8,), (1,), (1,)), (9, 7)),
    "a token each": lambda m: sliced(plan_of(m, (4, 4), (1, 1), (1, 1)), (1,) * 16),
    "tp 2, then replicas": lambda m: sliced(
        plan_of(m, (4, 4), (1, 2), (2, 1), shares={1: (3, 1)}), (10, 6)
    ),
    "sequence parallel, dropout": lambda m: sliced(
        plan_of(replace(m, dropout=0.2), (4, 4), (1, 1), (2, 2), sequence_parallel=True), (8, 6, 2)
    ),
    "replicas, ZeRO-2, dropout": lambda m: sliced(
        plan_of(replace(m, dropout=0.2), (4, 4), (2, 2), (1, 1), zero_stage=2), (9, 7)
    ),
    "selective recompute, ZeRO-0": lambda m: sliced(
        plan_of(m, (4, 4), (1, 2), (1, 1), selective_recompute=True, zero_stage=0), (6, 6, 4)
    ),
    "slack": lambda m: sliced(plan_of(m, (3, 3, 2), (1, 1, 1), (1, 1, 1), slack=2), (9, 7)),
    "broadcast": lambda m: sliced(
        replace(plan_of(m, (4, 4), (1, 1), (2, 2)), resharding="broadcast"), (10, 6)
    ),
    "direct, without overlap": lambda m: sliced(
        replace(plan_of(m, (4, 4), (2, 1), (1, 2)), resharding="direct", overlap=False), (10, 6)
    ),
    "tied, two pipelines, one of them whole": lambda m: sliced(
        two_pipelines(replace(m, tied_embeddings=True)), (10, 6), None
    ),
}
EVERYDAY: set[tuple[str, Schedule, str]] = {
    ("four unequal, three stages", "1f1b", "explicit"),
}
ON_CI = (
    *("tp 2, then replicas", "sequence parallel, dropout", "selective recompute, ZeRO-0"),
    *("direct, without overlap", "tied, two pipelines, one of them whole"),
)


def cases() -> Iterator[Any]:
    """Each layout that CI runs is tried in one way."""
    schedules: tuple[Schedule, ...] = ("1f1b", "gpipe")
    for number, layout in enumerate(LAYOUTS):
        for s, schedule in enumerate(schedules):
            for a, attention in enumerate(("explicit", "fused")):
                if "slack" in layout and schedule != "1f1b":
                    continue
                if "selective" in layout and attention == "fused":
                    continue
                case = layout, schedule, attention
                is_its_turn = number % 2 == s and (number // 2 % 2 == a or "selective" in layout)
                on_ci = is_its_turn and layout in ON_CI
                own = pytest.mark.long if on_ci else pytest.mark.exhaustive
                yield pytest.param(*case, marks=() if case in EVERYDAY else own)


@pytest.mark.parametrize(("layout", "schedule", "attention"), list(cases()))
def test_they_train_what_one_process_does(
    ranks: Ranks, layout: str, schedule: Schedule, attention: str
) -> None:
    model = tiny_model(layers=8, dtype="float64", attention=attention)
    plan = scheduled(LAYOUTS[layout](model), schedule, 1)
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float64"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "attention"),
    [("four unequal, three stages", "fused"), ("tp 2, then replicas", "explicit")],
)
def test_documents_that_slices_cut_train_what_each_alone_does(
    ranks: Ranks, tmp_path: Path, layout: str, attention: str
) -> None:
    data = conversations(tmp_path / "chats.tokens", 160, 21)
    plan = LAYOUTS[layout](tiny_model(layers=8, dtype="float64", attention=attention))
    got = learnt_by(ranks, plan, data)
    check_learnt(got, learnt_plainly(plan, data), TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("family", "attention"),
    sampled(
        [
            ("deepseek_v3", "fused"),
            *(
                (f, a)
                for f in CUTTABLE
                for a in ("explicit", "fused")
                if (f, a) != ("deepseek_v3", "fused")
            ),
        ],
        12,
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
    degrees = (1, 2) if attention == "fused" else (2, 2)
    plan = plan_of(model, (2, 2), (2, 1), degrees, sequence_parallel=attention == "fused")
    compare(ranks, sliced(plan, (14, 12, 6)), Decoder(model, folder))


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_documents_that_slices_cut_in_a_family_of_transformers(
    ranks: Ranks, tmp_path: Path, attention: str
) -> None:
    values = tiny_config("qwen3", layers=4).to_dict()
    model = read(values, "qwen3", sequence_length=16, dtype="float64", attention=attention)
    data = conversations(tmp_path / "chats.tokens", 160, 21)
    alone = learnt_by(ranks, plan_of(model, (4,), (1,), (1,)), data)
    plan = sliced(plan_of(model, (2, 2), (1, 1), (1, 1)), (7, 6, 3))
    check_learnt(learnt_by(ranks, plan, data), alone, TOLERANCE["float64"])


@pytest.mark.exhaustive
def test_a_run_goes_on_in_other_slices(ranks: Ranks, tmp_path: Path) -> None:
    model = tiny_model(layers=8, dtype="float64")
    plans = [LAYOUTS[name](model) for name in ("two unequal", "four equal")]
    losses = []
    for steps, plan in ((2, plans[0]), (4, plans[1]), (STEPS, sliced(plans[0], None))):
        losses += ranks.train(plan, steps, checkpoints=tmp_path).losses
    assert losses == pytest.approx(ranks.plainly(plans[0]).losses, rel=TOLERANCE["float64"])


def of_two_stages(**changes: Any) -> Plan:
    plan = make_plan(tiny_model(**changes), (2, 2), (1, 1), (1, 1), (False, True))
    return sliced(plan, (10, 6))


def test_a_file_says_slices_where_there_are_some(tmp_path: Path) -> None:
    for plan, count in ((of_two_stages(), 1), (sliced(of_two_stages(), None), 0)):
        write_plan(plan, tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json") == plan
        assert (tmp_path / "plan.json").read_text().count("token_slices") == count


def with_stage(plan: Plan, **changes: Any) -> Plan:
    """The same with another second stage."""
    (pipeline,) = plan.pipelines
    first, second = pipeline.stages
    stages = first, replace(second, **changes)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def with_replica(plan: Plan, **changes: Any) -> Plan:
    replica = replace(plan.pipelines[0].stages[1].replicas[0], **changes)
    return with_stage(plan, replicas=(replica,))


REFUSED: dict[str, tuple[Plan, str]] = {
    "one": (sliced(of_two_stages(), (16,)), r"is \[16\]; expected at least two"),
    "empty": (sliced(of_two_stages(), (16, 0)), "numbers of tokens above 0 that sum to .* 16"),
    "sum": (sliced(of_two_stages(), (8, 9)), "numbers of tokens above 0 that sum to .* 16"),
    "tp": (
        with_replica(sliced(of_two_stages(), (11, 5)), ranks=(1, 2)),
        r"degree 2 of stages\[1\] does not divide a slice of 11 tokens",
    ),
    "schedule": (replace(of_two_stages(), schedule="zb-h1"), "zb-h1 runs no slices; expected 1f1b"),
    "ministages": (
        with_stage(replace(of_two_stages(), schedule="gpipe"), ministages=2),
        r"does not go with ministages, which stages\[1\] has",
    ),
    "offload": (with_stage(of_two_stages(), offload=True), "does not go with offload"),
    "cp": (
        with_replica(of_two_stages(), ranks=(1, 2), token_shares=(10, 6)),
        "does not go with token_shares",
    ),
    "a part of the micro-batch": (
        with_replica(of_two_stages(), batch_share=2),
        r"batch shares of stages\[1\] sum to 2; expected all of micro_batch 4",
    ),
    "family": (
        sliced(make_plan(tiny_gpt2(), (2, 2), (1, 1), (1, 1), (False, False)), (10, 6)),
        "sequences of family gpt2 cannot run in slices",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    plan, message = REFUSED[name]
    with pytest.raises(PlanError, match=rf"^pipelines\[0\]\.token_slices.*{message}"):
        validate(plan)


def test_what_does_not_know_slices_refuses_them() -> None:
    plan = of_two_stages()
    validate(plan)
    with pytest.raises(PlanError, match="mixed lengths do not go with slices"):
        by_length([plan])
    with pytest.raises(ExportError, match="token_slices"):
        single_pipeline(plan)


def test_a_trace_has_the_bytes_and_the_way_of_each_slice() -> None:
    plan = of_two_stages()
    (pipeline,) = plan.pipelines
    spans = [
        Span(s, action.kind, action.micro_batch, number, number + 1, action.ministage)
        for s in range(2)
        for number, action in enumerate(actions(plan.schedule, pipeline, s))
    ]
    row_bytes = plan.micro_batch * plan.model.hidden * plan.model.dtype_bytes
    up, down = (
        [size for _, size in sent_bytes(plan, spans)[rank]][: pipeline.slices] for rank in (0, 1)
    )
    assert up == [10 * row_bytes, 16 * row_bytes]
    assert down == [6 * row_bytes, 16 * row_bytes]
    found = {
        (a.rank, a.name, b.rank, b.name, a.micro_batch == b.micro_batch)
        for a, b in flows(plan, spans)
    }
    assert found == {(0, "F", 1, "F", True), (1, "F", 1, "I", True), (1, "I", 0, "B", True)}


def test_a_trace_names_the_slice_of_each_action(tmp_path: Path) -> None:
    plan = of_two_stages()
    spans = [Span(0, "F", number, number, number + 1) for number in range(3)]
    arrows = {"predicted": [(spans[0], spans[2])]}
    slices = slices_by_rank(plan)
    write_chrome_trace(tmp_path / "t.json", {"predicted": spans}, flows=arrows, slices=slices)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == [
        *("F 0, slice 0", "F 0, slice 1", "F 1, slice 0")
    ]
    assert {e["name"] for e in events if e["ph"] == "s"} == {"micro-batch 1, slice 0"}
    shown = read_trace(tmp_path / "t.json", None)
    assert shown is not None
    assert [span[1] for row in shown["timelines"][0]["rows"] for span in row] == [0, 0, 1]


# ---------------------------------------------------------------- what they cost

MEASURED: dict[str, Callable[[LlamaModel], Plan]] = {
    "four unequal": lambda m: sliced(plan_of(m, (5, 3), (1, 1), (1, 1)), (12, 8, 7, 5)),
    "sequence parallel, three stages": lambda m: sliced(
        plan_of(m, (3, 3, 2), (1, 1, 1), (2, 1, 2), sequence_parallel=True), (8, 8, 8, 8)
    ),
    "gpipe, replicas, ZeRO-2": lambda m: scheduled(
        sliced(plan_of(m, (4, 4), (2, 1), (1, 2), zero_stage=2), (18, 14)), "gpipe", 1
    ),
    "slack": lambda m: sliced(plan_of(m, (3, 3, 2), (1, 1, 1), (1, 1, 1), slack=2), (20, 12)),
}


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("name", "attention"), sampled(product(MEASURED, ("fused", "explicit")), 8)
)
def test_a_peak_is_within_5_percent_below_the_predicted(
    chips: Ranks, name: str, attention: str
) -> None:
    check_memory(chips, MEASURED[name](tiny_model(**SIZES, attention=attention)))


@pytest.mark.exhaustive
def test_the_simulator_gives_each_slice_its_own_time() -> None:
    """Slices fill the pipeline sooner; alone, a stage takes a little longer for them."""
    model = tiny_model(sequence_length=2048, hidden=64, layers=8, attention="fused")
    chip = load_chip("a-mini")
    shares = token_shares(model, [1.0] * 4)

    def simulated(stages: int, slices: tuple[int, ...] | None) -> Simulation:
        plan = plan_of(model, (8 // stages,) * stages, (1,) * stages, (1,) * stages)
        stage = [replace(stage, recompute=False) for stage in plan.pipelines[0].stages]
        plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stage)),))
        return simulate(sliced(plan, slices), cluster_of(("x", chip, stages)))

    def busiest_s(simulation: Simulation) -> float:
        """The time that the slowest stage computes."""
        return max(share.work for share in simulation.shares) * simulation.step_s

    assert busiest_s(simulated(1, None)) < busiest_s(simulated(1, shares))
    whole, cut = simulated(4, None), simulated(4, shares)
    assert busiest_s(cut) < cut.step_s < whole.step_s
    # three micro-batches' times wait for the first to come through and the last to leave, or as
    # many slices'
    waits_s = [each.step_s - busiest_s(each) for each in (whole, cut)]
    assert waits_s[1] == pytest.approx(waits_s[0] / 4, rel=0.2)
    equal = simulated(4, (512,) * 4)
    first, *_, last = (s.end_s - s.start_s for s in equal.spans if (s.rank, s.name) == (0, "F"))
    assert first < last  # whose tokens see more keys


@pytest.mark.exhaustive
def test_a_slice_told_by_others_is_what_is_recorded_of_it() -> None:
    generator = random.Random("slices that are told")
    for attention in ("fused", "explicit"):
        model = tiny_model(sequence_length=320, layers=4, attention=attention)
        for first, last in product((False, True), repeat=2):
            tp, layers = generator.choice([1, 2]), generator.choice([1, 2])
            ends = sorted(generator.sample(range(tp, model.sequence_length, tp), 3))
            slices = tuple(b - a for a, b in pairwise((0, *ends, model.sequence_length)))
            for index in (0, 2):
                kind = StageKind(
                    block=model.block_kind(1),
                    first=first,
                    last=last,
                    tp=tp,
                    sequences=generator.choice([1, 2, 3]),
                    sequence_parallel=tp > 1,
                    whole_backward=generator.choice([False, True]),
                    optimizer=generator.choice(["adamw", "muon"]),
                    token_shares=slices,
                    cp_index=index,
                    sliced=True,
                ).with_slice_alone
                assert record_slice(model, layers, kind) == record_stage(model, layers, kind)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # more experts than the shortest slices have rows for
        pytest.param(
            "qwen3_moe",
            {"num_local_experts": 128, "num_experts_per_tok": 8},
            marks=pytest.mark.long,
        ),
        ("mistral", {"sliding_window": 64}),  # a kernel sees less of a later slice
    ],
)
def test_slices_of_experts_and_windows_cost_what_is_recorded(
    family: str, changes: dict[str, int]
) -> None:
    values = tiny_config(family, layers=2, **changes).to_dict()
    model = read(values, family, sequence_length=2048, attention="fused")
    for index, slices in product((0, 1), ((1024, 512, 512), (1000, 548, 500))):
        kind = StageKind(
            block=model.block_kind(1),
            first=False,
            last=True,
            tp=1,
            sequences=1,
            token_shares=slices,
            cp_index=index,
            sliced=True,
        ).with_slice_alone
        assert record_slice(model, 1, kind) == record_stage(model, 1, kind)


# ---------------------------------------------------------------- who chooses them


def slow_request(most: int) -> Request:
    """Three chips far from each other, one sequence for all of them, and most slices of it."""
    chip = load_chip("b-mini")
    links = replace(chip.links, nic_bytes_per_s=2e7, nic_latency_s=1e-5)
    chip = replace(chip, links=links, kernels=None)
    cluster = Cluster("slow", in_order([Node("b", chip, range(1))] * 3))
    model = tiny_model(sequence_length=2048, hidden=64, layers=8, attention="fused")
    return Request(
        cluster=cluster,
        model=model,
        global_batch=1,
        context_parallel=1,
        token_slices=most,
        zero_stage=0,
        open=frozenset({"schedule"}),
    )


@pytest.mark.long
def test_the_default_planner_chooses_them_where_links_are_slow() -> None:
    cut, kept = (ask("auto", slow_request(most), 1) for most in (8, 1))
    assert cut.best.plan.has_slices and not kept.best.plan.has_slices
    assert (
        cut.result.lower_bound_s <= cut.best.simulation.step_s < 0.6 * kept.best.simulation.step_s
    )
    found = next(filter(None, (pipeline.token_slices for pipeline in cut.best.plan.pipelines)))
    assert 2 <= len(found) <= 8


@pytest.mark.long
def test_a_plan_that_follows_on_lost_chips_has_them_too() -> None:
    request = slow_request(8)
    old = ask("auto", request, 1).best.plan
    left = request.cluster.kept([0, 2])
    found = replan(left, old, request.cluster.members)
    assert found.plan.has_slices and found.plan.world_size == 2


@pytest.mark.exhaustive
def test_a_plan_that_fits_in_slices_alone_is_found_again() -> None:
    chip = load_chip("b-mini")
    memory = replace(chip.memory, capacity_bytes=26 << 20)
    cluster = Cluster("small", in_order([Node("b", replace(chip, memory=memory), range(1))] * 4))
    model = tiny_model(sequence_length=8192, hidden=32, layers=12, attention="fused")
    old = sliced(plan_of(model, (3,) * 4, (1,) * 4, (1,) * 4), (512,) * 16)
    left = cluster.kept([0, 1, 2])
    found = replan(left, old, cluster.members)
    assert found.plan.has_slices and fits(found.plan, left)
    prediction = found.plan.prediction
    assert prediction is not None and prediction.lower_bound_s <= prediction.step_s


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--planner", "exact"], "token slices are for planner auto; exact runs sequences whole"),
        (["--schedule", "zb-h1"], "token slices: schedule zb-h1 runs none; expected 1f1b or gpipe"),
        (["--model", "gpt2"], "token slices: sequences of family gpt2 cannot run in slices"),
    ],
)
def test_a_search_that_cannot_have_them_says_so(options: list[str], said: str) -> None:
    command = ["--cluster", "quickstart", "--model", "quickstart", "--global-batch", "4"]
    result = CliRunner().invoke(app, [*command, "--token-slices", "4", *options])
    assert result.exit_code == 2 and said in result.stderr
