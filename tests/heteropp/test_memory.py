"""What a rank holds on an emulated chip, against what the plan was said to need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import layouts
import pytest
from layouts import LAYOUTS, MINISTAGES, SCHEDULES, plan_of, scheduled
from parity import RankError, Ranks
from sampled import sampled
from tiny_decoders import tiny_config
from training_run import NEUTRAL_CHIP, tiny_model

from heteropp.cost.documents import documents_bytes
from heteropp.cost.planned import rank_memory, stage_shape
from heteropp.cost.stage_memory import stage_memory
from heteropp.description.plan import Plan, Schedule
from heteropp.models.hugging_face.lora import with_lora
from heteropp.models.hugging_face.reading import read
from heteropp.schedule.in_flight import in_flight

STEPS = 3
SIZES = dict(layers=8, hidden=128, intermediate=384, vocab=512, sequence_length=32)


def lay_out(layout: str, schedule: Schedule) -> Plan:
    """Returns a layout's plan of a model whose tensors are larger than what allocators round to."""
    return scheduled(LAYOUTS[layout](tiny_model(**SIZES)), schedule, MINISTAGES.get(schedule, 1))


def chip(folder: Path, capacity_bytes: int) -> Path:
    """It computes with a chip's kernels, which keep other tensors than the host's."""
    text = NEUTRAL_CHIP.format(chips_per_node=16, capacity_bytes=capacity_bytes)
    path = folder / "chip.toml"
    path.write_text(text.replace("neutral = true", "neutral = false"))
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


EVERYDAY = (("sequence parallel, dropout", "zb-h1"),)
LONG = (
    ("two pipelines", "interleaved-1f1b"),
    ("micro-batch 4, 1", "chimera"),
    ("mixed chips", "zb-v"),
    ("ZeRO-2", "zb-v"),
    ("three pipelines", "chimera"),
    ("offload", "zb-v"),
    ("selective recompute", "gpipe"),
    ("slack", "1f1b"),
)


def marks(layout: str, schedule: Schedule) -> tuple[pytest.MarkDecorator, ...]:
    if (layout, schedule) in EVERYDAY:
        return ()
    return (pytest.mark.long if (layout, schedule) in LONG else pytest.mark.exhaustive,)


def check(ranks: Ranks, plan: Plan) -> None:
    trained = ranks.train(plan, STEPS, settings={"optimizer": plan.optimizer})
    found = zip(trained.peak_memory_bytes, trained.host_bytes, rank_memory(plan), strict=True)
    for rank, (peak, host, memory) in enumerate(found):
        assert 0.95 * memory.total <= peak <= memory.total, rank
        assert 0.95 * memory.host <= host <= memory.host, rank


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        pytest.param(layout, s, marks=marks(layout, s))
        for layout in LAYOUTS
        for s in SCHEDULES
        if layouts.lay_out(layout, s, "float32")
    ],
)
def test_a_peak_is_within_5_percent_below_the_predicted(
    ranks: Ranks, layout: str, schedule: Schedule
) -> None:
    check(ranks, lay_out(layout, schedule))


@pytest.mark.exhaustive
@pytest.mark.parametrize("selective", [True, False])
def test_masks_between_documents_take_what_is_charged_at_most(
    ranks: Ranks, selective: bool
) -> None:
    model = tiny_model(**{**SIZES, "sequence_length": 128})
    plan = plan_of(model, (5, 3), (2, 1), (1, 2), shares={0: (1, 3)}, selective_recompute=selective)
    apart = ranks.train(plan, STEPS, within="document").peak_memory_bytes
    across = ranks.train(plan, STEPS).peak_memory_bytes
    for rank, memory in enumerate(rank_memory(plan)):
        charged = documents_bytes(plan, rank)
        assert apart[rank] > across[rank]
        assert 0.95 * (memory.total + charged) <= apart[rank] <= memory.total + charged, rank


@pytest.mark.parametrize(
    ("offload", "zero_stage"),
    sampled([(True, 2), (False, 1), (False, 2), (True, 1)], 3, everyday=1),
)
def test_so_is_that_of_ministages_in_turn(ranks: Ranks, offload: bool, zero_stage: int) -> None:
    """Zorse's GPipe, with and without what it saves memory by."""
    model = tiny_model(**SIZES)
    options = dict(zero_stage=zero_stage, offload=offload)
    check(ranks, scheduled(plan_of(model, (4, 4), (2, 1), (1, 1), **options), "gpipe", 4, 2))


@pytest.mark.long
def test_so_is_that_of_muon(ranks: Ranks) -> None:
    """Shards of unlike sizes of state, and whole matrices in the update."""
    model = tiny_model(**SIZES)
    for plan in (
        plan_of(model, (4, 4), (3, 1), (1, 2), zero_stage=2, shares={0: (1, 2, 1)}),
        plan_of(replace(model, dtype="bfloat16"), (2, 6), (1, 2), (2, 1)),
    ):
        check(ranks, replace(plan, optimizer="muon"))


@pytest.mark.long
def test_so_is_that_of_16_bits_and_of_slack(ranks: Ranks) -> None:
    narrow = tiny_model(**SIZES, dtype="bfloat16")
    check(ranks, scheduled(plan_of(narrow, (4, 4), (2, 1), (1, 2)), "zb-v", 2))
    plan = plan_of(tiny_model(**SIZES), (2, 2, 4), (1, 1, 1), (1, 1, 1))
    (pipeline,) = plan.pipelines
    for ahead, recompute in ((0, False), (2, False), (2, True)):
        stages = tuple(
            replace(stage, slack=s + ahead, recompute=recompute)
            for s, stage in enumerate(pipeline.stages)
        )
        check(ranks, replace(plan, pipelines=(replace(pipeline, stages=stages),)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_so_is_that_of_frozen_weights(ranks: Ranks, dtype: str) -> None:
    """They have no gradient, no state, and their layers keep no input for one."""
    sizes = dict(hidden_size=128, intermediate_size=384, vocab_size=512, head_dim=32)
    values = tiny_config("qwen3", layers=8, **sizes).to_dict()
    model = read(values, "tiny", sequence_length=32, dtype=dtype)
    adapted = with_lora(model, "r=8,targets=q_proj+o_proj+down_proj")
    plan = plan_of(adapted, (4, 4), (2, 1), (1, 2), zero_stage=2, shares={0: (1, 3)})
    check(ranks, plan)
    check(ranks, scheduled(replace(plan, zero_stage=0), "zb-v", 2))
    whole = rank_memory(replace(plan, model=model))
    for ours, theirs in zip(rank_memory(plan), whole, strict=True):
        assert ours.parameters < 1.1 * theirs.parameters
        assert ours.gradients + ours.optimizer < 0.1 * (theirs.gradients + theirs.optimizer)
        assert ours.total < theirs.total


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_so_is_that_of_a_family_whose_rows_are_cut(ranks: Ranks, family: str) -> None:
    sizes = dict(hidden_size=128, intermediate_size=384, vocab_size=512, head_dim=32)
    model = read(tiny_config(family, layers=8, **sizes).to_dict(), "tiny", sequence_length=128)
    layout = (4, 4), (1, 1), (2, 2)
    plan = plan_of(model, *layout, sequence_parallel=True)
    check(ranks, plan)
    check(ranks, scheduled(plan, "zb-v", 2))
    for cut, whole in zip(rank_memory(plan), rank_memory(plan_of(model, *layout)), strict=True):
        assert cut.kept + cut.working < 0.95 * (whole.kept + whole.working)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(
    "layout",
    ["four stages", "figure 8", "tp 1 to 4", "tp 4 to 1", "mixed chips", "tied embeddings"],
)
def test_planners_charge_a_stage_no_less(layout: str, schedule: Schedule) -> None:
    """Else they would choose plans that are refused; but for how shards are rounded."""
    plan = lay_out(layout, schedule)
    (pipeline,) = plan.pipelines
    for rank, memory in enumerate(rank_memory(plan)):
        _, s, _, _ = plan.place(rank)
        held = in_flight(schedule, pipeline, s)
        shape = stage_shape(plan, rank)
        charged = stage_memory(plan.model, shape, held, pipeline.micro_batches).total
        assert charged + 1024 >= memory.total


def test_a_chip_with_the_predicted_memory_is_enough_and_needed(tmp_path: Path) -> None:
    """Offloaded it fits, to the byte; what holds everything on the chip does not."""
    alone = plan_of(tiny_model(**SIZES), (8,), (1,), (1,), offload=True)
    plan = scheduled(alone, "gpipe", 4)
    pipeline = plan.pipelines[0]
    stages = tuple(replace(stage, offload=False) for stage in pipeline.stages)
    kept = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    need = max(memory.total for memory in rank_memory(plan))
    assert max(memory.total for memory in rank_memory(kept)) > need
    tight = Ranks(chip(tmp_path, need))
    try:
        tight.train(plan, STEPS)
        with pytest.raises(RankError, match="OutOfMemoryError"):
            tight.train(kept, STEPS)
    finally:
        tight.close()
