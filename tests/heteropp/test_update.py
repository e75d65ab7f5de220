"""The end of a step in 16 bits, over chips of several vendors, and when gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import CLIP, RATE, STEPS, WARMUP, Ranks
from plain_llama import PlainLlama, train_plainly
from training_run import (
    NEUTRAL_CHIP,
    Training,
    make_plan,
    several_pipelines,
    tiny_model,
)

from heteropp.data.batch import Batch
from heteropp.data.source import open_tokens
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan, Replica, Stage
from heteropp.runtime.executor import Executor
from heteropp.runtime.measuring.metrics import HostClock
from heteropp.runtime.ranks.transport import Coordinates, Groups
from heteropp.runtime.step.loss_scale import GROWTH_STEPS, LossScale


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "float16"])
def test_a_model_of_16_bits_learns_as_one_of_32_does(ranks: Ranks, dtype: str) -> None:
    model = tiny_model(dtype=dtype)
    plan = several_pipelines(model, ((1, 3), (2, 1), (1, 2), 3), ((4,), (1,), (1,), 1))
    got = ranks.train(plan)
    wide = replace(model, dtype="float32")
    losses, norms, parameters = train_plainly(
        wide,
        open_tokens(ranks.data, Path(ranks.folder.name, "cache", "hyperhetero")),
        STEPS,
        plan.micro_batch,
        4,
        RATE[dtype],
        WARMUP,
        CLIP,
    )
    assert got.losses == pytest.approx(losses, rel=1e-3)
    assert got.norms == pytest.approx(norms, rel=1e-2)
    begin = dict(PlainLlama(wide, 0).named_parameters())
    moved = sum((parameters[name] - begin[name]).abs().sum() for name in parameters)
    apart = sum((parameters[name] - got.parameters[name]).abs().sum() for name in parameters)
    assert apart < 0.2 * moved


def test_steps_that_overflow_are_skipped_until_the_scale_fits() -> None:
    """What is then learned is, bit for bit, what is learned with that scale from the start."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        begin, _, _ = trained(scale=2.0**16, steps=0)
        _, skipped, _ = trained(scale=2.0**40, steps=30)
        count = skipped.index(False)
        assert count > 10
        parameters, _, scale = trained(scale=2.0**40, steps=count)
        assert scale == 2.0 ** (40 - count)
        assert torch.equal(parameters, begin)
        learned, _, _ = trained(scale=2.0**40, steps=count + 1)
        expected, skipped, _ = trained(scale=scale, steps=1)
        assert skipped == [False]
        assert torch.equal(learned, expected)
        assert not torch.equal(learned, begin)
    finally:
        dist.destroy_process_group()


def trained(scale: float, steps: int) -> tuple[torch.Tensor, list[bool], float]:
    """Parameters, which steps were skipped, and the scale, of one rank with one batch."""
    plan = make_plan(tiny_model(dtype="float16"), (4,), (1,), (1,), (False,), 1, 2)
    place = Coordinates.of(plan, 0)
    groups = Groups(place)
    module = plan.model.build((0, 4), groups.tensor_parallel, "cpu", torch.float16)
    module.initialise(0)
    executor = Executor(plan, place, groups, [module], Hyperparameters(), HostClock())
    assert executor.update.scaler
    executor.update.scaler.scale = scale
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(256, (2, 2, 16), generator=generator)
    skipped = []
    for _ in range(steps):
        executor.submit(1e-3, Batch(tokens, targets, 32, (0, 16)))
        result = executor.finish()
        assert math.isfinite(result.loss)
        skipped.append(result.skipped)
    return executor.flats[0].values.clone(), skipped, executor.update.scaler.scale


def test_the_scale_grows_when_all_goes_well_for_long() -> None:
    scale = LossScale(8.0)
    for _ in range(GROWTH_STEPS - 1):
        scale.went_well()
    assert scale.overflowed()
    assert scale.scale == 4.0
    for _ in range(GROWTH_STEPS):
        scale.went_well()
    assert scale.scale == 8.0
    assert not LossScale(2.0**-14).overflowed()


def test_chips_of_two_vendors_share_stages_and_pipelines(ranks: Ranks, tmp_path: Path) -> None:
    """Unequal shares in one stage, and another pipeline, on emulated chips that compute alike."""
    model = tiny_model(dtype="float64")
    plan = several_pipelines(model, ((3, 1), (2, 1), (1, 1), 2), ((4,), (1,), (2,), 1))
    first = plan.pipelines[0].stages[0]
    shares = tuple(
        replace(replica, batch_share=share)
        for replica, share in zip(first.replicas, (1, 3), strict=True)
    )
    stages = (replace(first, replicas=shares), *plan.pipelines[0].stages[1:])
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages), plan.pipelines[1]))
    expected = ranks.plainly(plan)
    chips = write_two_vendors(tmp_path)
    training = Training(
        tmp_path,
        on_ranks(plan, [0, 2, 1, 3, 4], chips),
        *("--steps", str(STEPS), "--warmup-steps", str(WARMUP), "--gradient-clip", str(CLIP)),
        *("--learning-rate", str(RATE["float64"])),
    ).finish()
    assert training.losses == pytest.approx(expected.losses, rel=1e-12)
    norms = [metrics["gradient_norm"] for metrics in training.metrics]
    assert norms == pytest.approx(expected.norms, rel=1e-12)


def write_two_vendors(folder: Path) -> list[str]:
    """A cluster of two vendors; gives each rank's chip."""
    nodes, chips = "", []
    for name, count, memory in (("a.toml", 2, 2 << 30), ("b.toml", 3, 1 << 30)):
        text = NEUTRAL_CHIP.format(chips_per_node=count, capacity_bytes=memory)
        (folder / name).write_text(text.replace('"Test"', f'"Vendor {name[0]}"'))
        nodes += f'[[nodes]]\nchip = "{name}"\n'
        chips += count * [name]
    (folder / "cluster.toml").write_text(f'name = "two vendors"\n{nodes}')
    return chips


def on_ranks(plan: Plan, ranks: list[int], chips: list[str]) -> Plan:
    """A plan with other ranks in place of its own, and their chips."""

    def moved(replica: Replica) -> Replica:
        now = tuple(ranks[rank] for rank in replica.ranks)
        return replace(replica, ranks=now, chip=chips[now[0]])

    def with_moved(stage: Stage) -> Stage:
        return replace(stage, replicas=tuple(map(moved, stage.replicas)))

    pipelines = tuple(
        replace(pipeline, stages=tuple(map(with_moved, pipeline.stages)))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)
