"""Any Hugging Face decoder trains over unlike stages as transformers trains it unsplit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from elastic_run import NODE, Elastic, Undisturbed, assert_as_undisturbed
from layouts import plan_of, scheduled
from parity import Ranks, Trained
from remote_family import write_scaled
from sampled import sampled
from tiny_decoders import write_folder
from training_run import NEUTRAL_CHIP

from heteropp.description.model import read_model
from heteropp.description.plan import Plan, Schedule
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read

STEPS = 3
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "glm4", "olmo2"),
    *("qwen3_moe", "deepseek_v3", "gpt_oss"),
)
EVERYDAY = ("gpt_oss",)
ROWS_EVERYDAY = ("deepseek_v3",)
# of three vendors, by stage: how each adds up products
ACCUMULATES = {"V": "float32", "W": "float64", "X": "float32"}


def three_vendors(folder: Path) -> list[Path]:
    """Writes chip files of three vendors, and gives those of six ranks, two of each."""
    for vendor, accumulate in ACCUMULATES.items():
        text = NEUTRAL_CHIP.format(chips_per_node=2, capacity_bytes=1 << 31)
        text = text.replace('vendor = "Test"', f'vendor = "{vendor}"')
        text = text.replace('accumulate = "float32"', f'accumulate = "{accumulate}"')
        (folder / f"{vendor}.toml").write_text(text.replace("neutral = true", "neutral = false"))
    return [folder / f"{vendor}.toml" for vendor in "VVWWXX"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chips=three_vendors(tmp_path_factory.mktemp("chips")))
    yield found
    found.close()


@dataclass(frozen=True)
class Decoder:
    model: HuggingFaceModel
    folder: Path  # of weights, none of which is a plain 0 or 1


Decoders = Callable[[str], Decoder]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    @cache
    def make(family: str) -> Decoder:
        folder = tmp_path_factory.mktemp("decoder") / family
        write_folder(folder, family, noise=0.05, layers=4)
        values = json.loads((folder / "config.json").read_text())
        return Decoder(read(values, family, sequence_length=32), folder)

    return make


def compare(ranks: Ranks, plan: Plan, decoder: Decoder) -> None:
    got = ranks.train(plan, STEPS, weights=decoder.folder)
    plain = ranks.plainly(plan, STEPS, weights=decoder.folder)
    check(got, plain)


def check(got: Trained, plain: Trained) -> None:
    assert got.losses == pytest.approx(plain.losses, rel=2e-6)
    assert got.validation_loss == pytest.approx(plain.validation_loss, rel=2e-6)
    for name, expected in plain.parameters.items():
        error = (got.parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5, f"{name}: {error:.3g}"


@pytest.mark.parametrize(
    "family",
    [*EVERYDAY, *sampled((f for f in FAMILIES if f not in EVERYDAY), 15)],
)
def test_three_unlike_stages_of_three_vendors(
    ranks: Ranks, decoders: Decoders, family: str
) -> None:
    found = decoders(family)
    compare(ranks, plan_of(found.model, (1, 2, 1), (1, 2, 1), (2, 1, 2)), found)


def rows_cut(model: HuggingFaceModel, **stage: Any) -> Plan:
    """Returns a plan in which ranks have halves of a sequence, and one in which they have two."""
    shares = {0: (1,), 2: (2,)}
    return plan_of(
        model, (1, 2, 1), (1, 2, 1), (2, 1, 2), shares=shares, sequence_parallel=True, **stage
    )


@pytest.mark.parametrize(
    "family",
    [*ROWS_EVERYDAY, *sampled((f for f in FAMILIES if f not in ROWS_EVERYDAY), 15)],
)
def test_rows_that_are_cut_over_ranks(ranks: Ranks, decoders: Decoders, family: str) -> None:
    found = decoders(family)
    compare(ranks, rows_cut(found.model), found)


@pytest.mark.parametrize(
    "family",
    # windows and a soft cap, full, values narrower than keys, windows
    sampled(["gemma2", "qwen3", "deepseek_v3", "gemma3_text"], 4),
)
def test_attention_in_one_kernel(ranks: Ranks, decoders: Decoders, family: str) -> None:
    found = decoders(family)
    fused = replace(found.model, attention="fused")
    compare(ranks, plan_of(fused, (1, 2, 1), (1, 2, 1), (2, 1, 2)), replace(found, model=fused))


@pytest.mark.parametrize(
    ("family", "are_cut"),
    # the last has a soft cap
    sampled([("mistral", True), ("gemma3_text", False), ("gemma2", False)], 3),
)
def test_one_kernel_keeps_documents_apart(
    ranks: Ranks, decoders: Decoders, family: str, are_cut: bool
) -> None:
    """are_cut: whether ranks have parts of a sequence."""
    found = decoders(family)
    options: dict[str, Any] = dict(weights=found.folder, within="document")
    fused = replace(found.model, attention="fused")
    plan = rows_cut(fused) if are_cut else plan_of(fused, (1, 2, 1), (1, 2, 1), (2, 1, 2))
    check(
        ranks.train(plan, STEPS, **options),
        ranks.train(plan_of(found.model, (4,), (1,), (1,)), STEPS, **options),
    )


@pytest.mark.parametrize("family", sampled(["gpt_oss", "gemma2"], 2))
def test_documents_are_kept_apart_where_rows_are_cut(
    ranks: Ranks, decoders: Decoders, family: str
) -> None:
    """What is learnt is what one chip learns, of each as if alone (test_every_family.py)."""
    found = decoders(family)
    options: dict[str, Any] = dict(weights=found.folder, within="document")
    alone = ranks.train(rows_cut(found.model), STEPS, **options)
    check(alone, ranks.train(plan_of(found.model, (4,), (1,), (1,)), STEPS, **options))
    assert alone.losses != pytest.approx(
        ranks.train(rows_cut(found.model), STEPS, weights=found.folder).losses, rel=1e-4
    )


@pytest.mark.parametrize("family", sampled(["deepseek_v3", "qwen2"], 2))
def test_rows_that_are_cut_are_computed_again(
    ranks: Ranks, decoders: Decoders, family: str
) -> None:
    found = decoders(family)
    plan = rows_cut(found.model, zero_stage=2)
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, recompute=stage.tp > 1) for stage in pipeline.stages)
    compare(ranks, replace(plan, pipelines=(replace(pipeline, stages=stages),)), found)


@pytest.mark.parametrize(
    ("family", "schedule"),  # of either family one, and unlike ones
    sampled(product(["gemma2", "qwen3_moe"], ["zb-h1", "zb-v", "interleaved-1f1b"]), 6),
)
def test_rows_that_are_cut_under_other_schedules(
    ranks: Ranks, decoders: Decoders, family: str, schedule: Schedule
) -> None:
    found = decoders(family)
    layout = (2, 2), (1, 1), (2, 2)
    plan = plan_of(found.model, *layout, shares={0: (1,)}, zero_stage=2, sequence_parallel=True)
    compare(ranks, scheduled(plan, schedule, 1 if schedule == "zb-h1" else 2), found)


@pytest.mark.parametrize(
    ("changes", "tp"),
    [
        ({}, (2, 1, 2)),
        pytest.param({"has_tp_plan": False}, (1, 1, 1), marks=pytest.mark.exhaustive),
        pytest.param({"layers_give_tuples": True}, (2, 1, 2), marks=pytest.mark.long),
    ],
    ids=["cut", "uncut", "tuples"],
)
def test_a_family_that_is_code_in_its_folder(
    ranks: Ranks, tmp_path: Path, changes: dict[str, bool], tp: tuple[int, int, int]
) -> None:
    folder = write_scaled(tmp_path / "scaled", **changes)
    model = read_model(folder, 32, trust_remote_code=True)
    assert isinstance(model, HuggingFaceModel)
    compare(ranks, plan_of(model, (1, 2, 1), (1, 2, 1), tp), Decoder(model, folder))
    if tp == (1, 1, 1):
        assert "has no tensor-parallel plan" in str(model.tp_problem(2))


@pytest.mark.parametrize(
    ("family", "schedule"),  # of either family one, and unlike ones
    sampled(product(["qwen3", "qwen3_moe"], ["zb-v", "interleaved-1f1b"]), 4),
)
def test_schedules_that_put_off_or_interleave(
    ranks: Ranks, decoders: Decoders, family: str, schedule: Schedule
) -> None:
    found = decoders(family)
    plan = plan_of(found.model, (2, 2), (1, 2), (2, 1), zero_stage=2)
    compare(ranks, scheduled(plan, schedule, 2), found)


@pytest.mark.parametrize("family", sampled(["qwen3_moe", "qwen3"], 2))
def test_it_resumes_under_another_plan(
    ranks: Ranks, decoders: Decoders, tmp_path: Path, family: str
) -> None:
    found = decoders(family)
    one = plan_of(found.model, (1, 2, 1), (1, 2, 1), (2, 1, 2))
    other = scheduled(plan_of(found.model, (2, 2), (2, 1), (1, 2), zero_stage=2), "zb-v", 2)
    before = ranks.train(one, 2, checkpoints=tmp_path, weights=found.folder)
    after = ranks.train(other, STEPS, checkpoints=tmp_path)
    plain = ranks.plainly(one, STEPS, weights=found.folder)
    check(replace(after, losses=[*before.losses, *after.losses]), plain)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", marks=pytest.mark.exhaustive),
    ],
)
def test_a_chip_leaves_and_another_is_lost(decoders: Decoders, tmp_path: Path, family: str) -> None:
    """Losses stay those of a run that nothing disturbed."""
    model = decoders(family).model
    (tmp_path / "alone").mkdir()
    alone = Undisturbed(tmp_path / "alone", model)
    training = Elastic(tmp_path, plan_of(model, (2, 1, 1), (1, 1, 1), (2, 1, 2)), "--notice", "250")
    try:
        training.until(4)
        training.send(signal.SIGTERM, f"{NODE}-0/1")  # with notice
        training.until_generation(2)
        training.until(training.changes[-1]["step"] + 3)
        training.send(signal.SIGKILL, f"{NODE}-1/0")
        training.until_generation(3)
        assert_as_undisturbed(training, alone)
        assert [change["start"] for change in training.changes] == ["initial", "switch", "recover"]
    finally:
        training.process.kill()
