"""Experts that lie over ranks beside LoRA, offloading, plans by length and measured profiles."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from clusters import cluster_of
from layouts import plan_of, scheduled
from parity import STEPS, TOLERANCE, Ranks
from sampled import sampled
from test_auto_expert_parallel import decoder as one_layer
from test_expert_capacity import with_capacity
from test_expert_parallel import alone, balanced, decoder, spread
from test_lora import check as check_lora
from test_lora import folders, model_of
from test_memory import check as check_memory
from test_memory import chip
from test_mixed_lengths import DOCUMENTS, check_added_once, of_length, plainly
from test_mixed_lengths import check as check_lengths
from test_parity import check

from ditorch.chips import ChipSpec, load_chip
from heteropp.cost.planned import rank_memory
from heteropp.cost.stage_time import NO_LINK, StageShape, stage_memory, stage_time
from heteropp.cost.tracing.kind import Spread
from heteropp.cost.tracing.traces import trace_stages
from heteropp.data.source import open_tokens
from heteropp.description.plan import Plan, PlanError
from heteropp.description.profile import Block, Measured, Profile, measured_cluster
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.spec import ModelSpec
from heteropp.runtime.mixed_lengths.deliveries import deliveries
from heteropp.runtime.mixed_lengths.memory import memory_bytes
from heteropp.runtime.mixed_lengths.parameters import alike
from heteropp.runtime.mixed_lengths.plans import by_length as sorted_by_length
from heteropp.search.judge import ask
from heteropp.search.planner import Request

__all__ = ["folders"]
SHORT, MIDDLE, LONG = 8, 16, 32


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


# ---------------------------------------------------------------- LoRA


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)]
)
def test_lora_trains_beside_frozen_experts_what_peft_trains(
    ranks: Ranks, folders, family: str
) -> None:
    folder = folders(family)
    plan = plan_of(model_of(folder), (2, 2), (2, 2), (1, 2), shares={0: (1, 3)}, zero_stage=2)
    plan = spread(plan, {0: (3, 1), 1: (1, 3)})
    check_lora(ranks, plan, ranks.train(plan, STEPS, weights=folder), folder)


# ---------------------------------------------------------------- offloading


def offloaded(model: ModelSpec, zero_stage: int = 1) -> Plan:
    plan = plan_of(model, (2, 2), (2, 1), (1, 2), zero_stage=zero_stage, offload=True)
    return scheduled(spread(plan, {0: (3, 1)}), "gpipe", 2)


def test_offloaded_experts_train_what_one_device_does(ranks: Ranks) -> None:
    plan = offloaded(decoder())
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.parametrize("zero_stage", sampled([2, 0], 2))
def test_so_they_do_on_chips_within_the_predicted_memory(chips: Ranks, zero_stage: int) -> None:
    plan = offloaded(balanced(), zero_stage)
    check_memory(chips, plan)
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, offload=False) for stage in pipeline.stages)
    kept = rank_memory(replace(plan, pipelines=(replace(pipeline, stages=stages),)))
    assert all(o.total < k.total for o, k in zip(rank_memory(plan), kept, strict=True))


# ---------------------------------------------------------------- plans by length


@cache
def by_length(model: HuggingFaceModel) -> dict[str, tuple[Plan, ...]]:
    """Returns the plan of short sequences and those of longer ones, by name."""
    over_two = spread(plan_of(model, (4,), (2,), (2,)), {0: (3, 1)})
    over_four = spread(plan_of(model, (4,), (4,), (1,)), {0: (1,) * 4})
    in_line = spread(plan_of(model, (2, 2), (2, 2), (1, 1)), {1: (1, 3)})
    return {
        "over four, then over two with tp": (
            of_length(over_four, SHORT, 3),
            of_length(over_two, LONG, 1),
        ),
        "in a pipeline, then whole, then over four": (
            of_length(in_line, SHORT, 2),
            of_length(plan_of(model, (4,), (2,), (2,)), MIDDLE, 2),
            of_length(over_four, LONG, 1),
        ),
        "the same layout": (of_length(over_two, SHORT, 2), of_length(over_two, MIDDLE, 2)),
    }


LENGTHS = list(by_length(decoder()))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, letters = tmp_path_factory.mktemp("documents"), random.Random(1)
    for n in range(90):
        text = letters.choices(string.ascii_lowercase, range(26, 0, -1), k=letters.choice(SIZES))
        (folder / f"{n:03}.txt").write_text("".join(text))
    return folder


SIZES = (2, 3, 5, 7, SHORT, SHORT, 9, 12, MIDDLE, 20, LONG)


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.long if i else ()) for i, n in enumerate(LENGTHS)]
)
def test_plans_by_length_train_what_one_device_does_with_the_longest(
    ranks: Ranks, documents: Path, case: str
) -> None:
    plans = by_length(decoder())[case]
    given = dict(documents=DOCUMENTS, data=documents)
    whole = plan_of(decoder(), (4,), (1,), (1,))
    whole = of_length(whole, plans[-1].model.sequence_length, 1)
    one = ranks.train(whole, by_length=(whole,), **given)
    check_lengths(ranks.train(plans[0], by_length=plans, **given), one, TOLERANCE["float64"])


def test_plans_by_length_train_what_transformers_learns_of_each_document_alone(
    ranks: Ranks, documents: Path
) -> None:
    plans = by_length(decoder(dtype="float32"))[LENGTHS[0]]
    tokens = open_tokens(documents, Path(ranks.folder.name, "cache", "hyperhetero"))
    got = ranks.train(plans[0], by_length=plans, documents=DOCUMENTS, data=documents)
    expected = plainly(plans[-1].model, tokens, DOCUMENTS)
    assert got.losses == pytest.approx(expected.losses, rel=2e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)
    assert got.losses[-1] != pytest.approx(got.losses[0], rel=1e-4)


@pytest.mark.parametrize("case", LENGTHS)
def test_every_part_of_a_gradient_is_added_once(case: str) -> None:
    home, *others = by_length(decoder())[case]
    for other in others:
        check_added_once(home, other)
        if case == "the same layout":
            assert all(alike(home, other, rank) for rank in range(home.world_size))
            assert all(d.receiver in d.senders for d in deliveries(home, other))


def of_lora(folder: Path) -> tuple[Plan, Plan]:
    """Few of its weights train."""
    model = replace(model_of(folder, "q_proj+v_proj"), dtype="float64")
    short = spread(plan_of(model, (4,), (2,), (1,)), {0: (3, 1)})
    return of_length(short, SHORT, 2), of_length(plan_of(model, (4,), (1,), (2,)), LONG, 1)


def test_copies_of_what_is_frozen_count_where_plans_hold_other_slices(folders) -> None:
    plans = of_lora(folders("qwen3_moe"))
    model = plans[1].model
    alone, together = rank_memory(plans[0]), memory_bytes(plans)[0]
    for rank, need in enumerate(together):
        frozen = [p for p in model.parameters() if not p.trains]
        copies = sum(box.size for p in frozen for box in p.boxes(2, rank)) * model.dtype_bytes
        assert need >= alone[rank].total + copies


@pytest.mark.long
def test_lora_by_length_stays_within_the_predicted_memory(
    chips: Ranks, folders, documents: Path
) -> None:
    folder = folders("qwen3_moe")
    plans = of_lora(folder)
    given = dict(documents=DOCUMENTS, data=documents, weights=folder)
    peaks = chips.train(plans[0], by_length=plans, **given).peak_memory_bytes
    needs = [max(needs) for needs in zip(*memory_bytes(plans), strict=True)]
    assert all(peak <= need for peak, need in zip(peaks, needs, strict=True))


@pytest.mark.long
def test_lora_by_length_trains_what_one_device_does_with_the_longest(
    ranks: Ranks, folders, documents: Path
) -> None:
    folder = folders("qwen3_moe")
    plans = of_lora(folder)
    given = dict(documents=DOCUMENTS, data=documents, weights=folder)
    whole = of_length(plan_of(plans[1].model, (4,), (1,), (1,)), LONG, 1)
    one = ranks.train(whole, by_length=(whole,), **given)
    check_lengths(ranks.train(plans[0], by_length=plans, **given), one, TOLERANCE["float64"])


def test_plans_by_length_cannot_say_how_many_rows_come_of_padding() -> None:
    short, long = by_length(decoder())["the same layout"]
    with pytest.raises(PlanError, match="of sequence_length 16 has expert_capacity; padding is"):
        sorted_by_length([short, with_capacity(long, 2)])


# ---------------------------------------------------------------- profiles


SLOWER, MORE_BYTES = 3.0, 1 << 16  # than chip files and traces say
TERMS = ("forward_s", "backward_input_s", "backward_weight_s", "norm_s", "update_s")
ENDS = ((1, False, False), (2, False, False), (4, False, False), (1, True, False), (1, False, True))


def measured(
    model: ModelSpec, spec: ChipSpec, names: Sequence[str], sequences: int, ends: float = SLOWER
) -> Profile:
    """What measuring ranks with all experts might have said of chips; ends: how many times slower
    an embedding and a head are than chip files say.
    """

    def block(chip: str, layers: int, first: bool, last: bool) -> Measured:
        own = shape(layers, first=first, last=last, sequences=sequences)
        blocks = replace(own, first=False, last=False)
        time, inner = (stage_time(model, s, spec, NO_LINK, NO_LINK) for s in (own, blocks))

        def slower(term: str) -> float:
            of_blocks = getattr(inner, term)
            return SLOWER * of_blocks + ends * (getattr(time, term) - of_blocks)

        traced = trace_stages(model, own.kind())
        of = {
            name: traced.of(layers, lambda t, name=name: getattr(t, name)) + MORE_BYTES
            for name in ("input_bytes", "kept_bytes", "update_peak_bytes")
        }
        return Measured(
            block=Block(
                chip=chip, tp=1, sequences=sequences, layers=layers, first=first, last=last
            ),
            recompute_s=slower("forward_s"),
            kept_recompute_bytes=of["input_bytes"],
            kept_bytes=of["kept_bytes"],
            working_bytes=traced.peak(layers, lambda t: t.backward_input_peak_bytes) + MORE_BYTES,
            update_bytes=of["update_peak_bytes"],
            **{term: slower(term) for term in TERMS},
        )

    blocks = tuple(block(name, *kind) for name in names for kind in ENDS)
    return Profile(name="made up", model=model, blocks=blocks, links=())


def shape(layers: int, **changes: Any) -> StageShape:
    given = dict(first=False, last=False, tp=1, dp=1, sequences=2, zero_stage=1, recompute=False)
    return StageShape(layers=layers, **{**given, **changes})


@pytest.mark.parametrize("ends", [SLOWER, 4 * SLOWER])
@pytest.mark.parametrize("shares", [(1, 3), (3, 1)])
def test_a_chip_measured_as_slower_is_so_wherever_experts_lie(
    shares: tuple[int, ...], ends: float
) -> None:
    """Where experts lie has no part in what a head takes, which may be slower by another factor."""
    model, spec = balanced(), load_chip("a-mini")
    profile = measured(model, spec, ["x"], 2, ends).of("x")
    spread_over = Spread(shares, (1, 1))
    for layers, last in ((2, False), (3, True), (1, True)):
        own = shape(layers, last=last, dp=2, spread=spread_over)
        blocks = replace(own, last=False)
        ours, theirs, inner = (
            stage_time(model, one, spec, NO_LINK, NO_LINK, found)
            for one, found in ((own, profile), (own, None), (blocks, None))
        )
        for term in set(TERMS) - {"norm_s"}:  # whose launches profiles do not tell apart
            of_blocks = getattr(inner, term)
            expected = SLOWER * of_blocks + ends * (getattr(theirs, term) - of_blocks)
            assert getattr(ours, term) == pytest.approx(expected, rel=0.02), term


def test_bytes_measured_beside_the_traced_ones_are_there_wherever_experts_lie() -> None:
    model, spec = balanced(), load_chip("a-mini")
    profile = measured(model, spec, ["x"], 2).of("x")
    own = shape(2, dp=2, spread=Spread((1, 3), (1, 1)))
    ours, theirs = (stage_memory(model, own, 3, 4, found) for found in (profile, None))
    assert ours.parameters == theirs.parameters and ours.optimizer == theirs.optimizer
    assert ours.kept == theirs.kept + 2 * MORE_BYTES  # of two micro-batches beside that at work


@pytest.mark.long
def test_a_plan_by_a_profile_lets_experts_lie_over_ranks_where_nothing_else_fits() -> None:
    spec = replace(load_chip("a-mini"), tp_limit=1)
    small = replace(spec, memory=replace(spec.memory, capacity_bytes=3_000_000))
    model = one_layer(intermediate_size=256)
    profile = measured(model, spec, ["x"], 1)
    cluster = measured_cluster(cluster_of(("x", small, 4)), profile)
    request = Request(cluster=cluster, model=model, global_batch=8, sequences=1)
    assert "no plan fits" in str(ask("auto", replace(request, expert_parallel=1)).error)
    plan = ask("auto", request, 1).best.plan
    assert plan.has_expert_parallelism and plan.profile == profile.citation
