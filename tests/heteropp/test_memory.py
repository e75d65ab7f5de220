"""What a rank holds on an emulated chip, against what the plan was said to need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from layouts import LAYOUTS, MINISTAGES, plan_of, scheduled
from parity import RankError, Ranks
from training_run import NEUTRAL_CHIP, tiny_model

from heteropp.plan import Plan, Schedule
from heteropp.planned import rank_memory

STEPS = 3
SIZES = dict(layers=8, hidden=128, intermediate=384, vocab=512, sequence_length=32)


def lay_out(layout: str, schedule: Schedule) -> Plan:
    """Of a model whose tensors are larger than what allocators round to."""
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


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ("two stages", "1f1b"),
        ("offload", "1f1b"),
        ("offload", "gpipe"),
        ("sequence parallel, dropout", "1f1b"),
        ("sequence parallel, dropout", "interleaved-1f1b"),
        ("sequence parallel, dropout", "zb-h1"),
        ("selective recompute", "gpipe"),
    ],
)
def test_a_peak_is_within_5_percent_below_the_predicted(
    ranks: Ranks, layout: str, schedule: Schedule
) -> None:
    plan = lay_out(layout, schedule)
    peaks = ranks.train(plan, STEPS).peak_memory_bytes
    for rank, (peak, memory) in enumerate(zip(peaks, rank_memory(plan), strict=True)):
        assert 0.95 * memory.total <= peak <= memory.total, rank


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
