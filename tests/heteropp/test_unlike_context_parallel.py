"""Sequences cut over unlike chips of one replica: numerics, times, memory, and what is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import cluster_of
from layouts import plan_of, scheduled
from parity import TOLERANCE, Ranks
from sampled import sampled
from test_context_parallel import Shares, cut
from test_hugging_face_training import three_vendors
from test_parity import check
from training_run import NEUTRAL_CHIP, Training, refusal, tiny_model

from ditorch.chips import ChipSpec, load_chip
from heteropp import token_shares
from heteropp.board.figures import Figures
from heteropp.cost.capacity import check_memory
from heteropp.cost.planned import rank_memory, rank_times
from heteropp.description.cluster import Cluster
from heteropp.description.outline import outline
from heteropp.description.plan import Plan, PlanError, Schedule, read_plan, validate, write_plan
from heteropp.description.used_chips import chips_in_words
from heteropp.models.llama.model import LlamaModel
from heteropp.search.auto.busy import busy_s
from heteropp.simulator.simulate import simulate

CHIPS = "v.toml", "w.toml"  # of the groups of every replica that is cut here


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two vendors in turn, which compute and add up products by kernels of their own."""
    v, _, w, *_ = three_vendors(tmp_path_factory.mktemp("chips"))
    found = Ranks(chips=[v, w, v, w])
    yield found
    found.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two chips of one vendor, and two of another."""
    v, _, w, *_ = three_vendors(tmp_path_factory.mktemp("chips"))
    found = Ranks(chips=[v, v, w, w])
    yield found
    found.close()


def unlike(plan: Plan, shares: Shares, chips: Sequence[str] = CHIPS) -> Plan:
    """The first stage cut so over unlike chips."""
    plan = cut(plan, {0: [shares]})
    (pipeline,) = plan.pipelines
    first, *others = pipeline.stages
    replicas = tuple(replace(r, chip=chips[0], group_chips=tuple(chips)) for r in first.replicas)
    stages = (replace(first, replicas=replicas), *others)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


# ---------------------------------------------------------------- what it computes


@pytest.mark.parametrize(
    ("schedule", "dtype", "attention"),
    sampled(
        [
            ("zb-h1", "float32", "fused"),
            ("1f1b", "float64", "explicit"),
            ("1f1b", "float32", "fused"),
            ("zb-h1", "float64", "explicit"),
        ],
        3,
        everyday=1,
    ),
)
def test_two_vendors_train_what_one_process_does(
    ranks: Ranks, schedule: Schedule, dtype: str, attention: str
) -> None:
    """A stage of both, with unequal parts of every sequence, and one that recomputes."""
    model = tiny_model(layers=8, dtype=dtype, attention=attention)
    plan = scheduled(unlike(plan_of(model, (5, 3), (1, 1), (2, 1)), (6, 10)), schedule, 1)
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dp", "sequence_parallel"), sampled([(2, False), (1, False), (1, True)], 3)
)
def test_so_they_do_in_several_replicas_and_beside_tensor_parallelism(
    ranks: Ranks, pairs: Ranks, dp: int, sequence_parallel: bool
) -> None:
    model = tiny_model(layers=4, dtype="float64", attention="fused", dropout=0.2)
    plan = plan_of(model, (4,), (dp,), (4 // dp,), sequence_parallel=sequence_parallel)
    plan = unlike(plan, (6, 10))
    check((ranks if dp == 2 else pairs).train(plan), ranks.plainly(plan), TOLERANCE["float64"])


def write_two_vendors(folder: Path, *capacity_bytes: int) -> None:
    """Two nodes of one chip each, v.toml and w.toml."""
    text = 'name = "two vendors"\n'
    for name, size in zip(CHIPS, capacity_bytes, strict=True):
        chip = NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=size)
        (folder / name).write_text(chip.replace('"NEUTRAL"', f'"{name[0].upper()}"'))
        text += f'[[nodes]]\nchip = "{name}"\n'
    (folder / "cluster.toml").write_text(text)


@pytest.mark.long
def test_every_rank_of_a_replica_is_started_on_its_own_chip(tmp_path: Path) -> None:
    """The second, whose chip has too little memory, finds that out."""
    plan = unlike(plan_of(tiny_model(), (4,), (1,), (2,)), (6, 10))
    write_two_vendors(tmp_path, 1 << 30, 1 << 30)
    assert len(Training(tmp_path, plan, "--steps", "2", "--json").finish().losses) == 2
    turned = unlike(plan, (6, 10), CHIPS[::-1])
    write_plan(turned, tmp_path / "plan.json")
    refused = "expects chip w.toml at rank 0; cluster two vendors has v.toml there"
    assert refused in refusal(tmp_path, "--steps", "2")

    write_two_vendors(tmp_path, 1 << 30, 100_000)
    write_plan(plan, tmp_path / "plan.json")
    assert "on rank 1 (chip w.toml), which has 97.7 KiB" in refusal(tmp_path, "--steps", "2")
    shutil.rmtree(tmp_path / "run")
    code, _, said = Training(tmp_path, plan, "--steps", "2", "--force").wait()
    assert code == 1 and "training stopped: rank 1 (chip W) ran out of memory" in said, said


# ---------------------------------------------------------------- what it costs


def of_speed(speed: float, capacity_bytes: int = 1 << 30) -> ChipSpec:
    chip = load_chip("a-mini")
    return replace(
        chip,
        compute=replace(
            chip.compute,
            launch_s=0,
            float32_flops=chip.compute.float32_flops * speed,
            other_flops=chip.compute.other_flops * speed,
        ),
        memory=replace(
            chip.memory,
            bandwidth_bytes_per_s=chip.memory.bandwidth_bytes_per_s * speed,
            capacity_bytes=capacity_bytes,
        ),
        links=replace(chip.links, nic_bytes_per_s=1e10, nic_latency_s=0),
    )


SIZES = dict(layers=2, hidden=256, intermediate=768, sequence_length=256)
MODEL = tiny_model(**SIZES, attention="fused")
SPEEDS = 1.0, 2.0


def on(speeds: Sequence[float]) -> Cluster:
    return cluster_of(*((name, of_speed(s), 1) for name, s in zip(CHIPS, speeds, strict=True)))


def of_two(model: LlamaModel, shares: Shares) -> Plan:
    return unlike(plan_of(model, (model.layers,), (1,), (2,)), shares)


def test_each_part_is_charged_on_its_own_chip_and_the_slower_counts() -> None:
    plan = of_two(MODEL, (90, 166))
    slow, fast, mixed = (rank_times(plan, on(speeds)) for speeds in ((1, 1), (2, 2), SPEEDS))
    assert mixed == [slow[0], fast[1]] and slow != fast
    step_s = simulate(plan, on(SPEEDS)).step_s
    assert simulate(plan, on((2, 2))).step_s < step_s <= simulate(plan, on((1, 1))).step_s
    assert busy_s(plan, on(SPEEDS)) <= step_s
    of_slower = max(time.forward_s + time.backward_s for time in mixed)
    assert busy_s(plan, on(SPEEDS)) >= 4 * of_slower


@pytest.mark.exhaustive
def test_parts_by_speed_are_as_fast_as_any() -> None:
    """Some of all cuts are simulated; equal parts are far behind."""

    def step_s(first: int) -> float:
        plan = of_two(MODEL, (first, MODEL.sequence_length - first))
        return simulate(plan, on(SPEEDS)).step_s

    first, _ = token_shares(MODEL, SPEEDS)
    best_s = min(map(step_s, range(32, MODEL.sequence_length, 32)))
    assert step_s(first) <= 1.02 * best_s
    assert step_s(MODEL.sequence_length // 2) > 1.25 * step_s(first)


@pytest.mark.parametrize(("emulated", "messages"), [(False, 4), (True, 2)])
def test_keys_for_several_parts_go_one_after_another_but_on_emulated_chips(
    emulated: bool, messages: int
) -> None:
    """Their pairs have links of their own; else what a rank sends passes its own way out."""
    model = tiny_model(sequence_length=96, hidden=64, attention="fused")
    plan = cut(plan_of(model, (4,), (1,), (3,), zero_stage=0), {0: [(32, 32, 32)]})

    def step_s(bandwidth: float) -> float:
        chip = of_speed(1)
        chip = replace(chip, links=replace(chip.links, intra_node_bytes_per_s=bandwidth))
        return simulate(plan, cluster_of(("x", chip, 3)), emulated=emulated).step_s

    part = 4 * 32 * 2 * model.kv_heads * model.head_size * 4  # of a micro-batch, in float32
    exchanged = messages * part * model.layers * 4  # forward and back, of four micro-batches
    gradients = 4 * model.elements() * 2 * 2 / 3  # in a ring of three
    slower = (step_s(1e5) - step_s(1e6)) / (1 / 1e5 - 1 / 1e6)
    assert slower == pytest.approx(exchanged + gradients, rel=0.02)


def test_the_chip_that_lacks_memory_is_named() -> None:
    """It is the one that has less, though the other holds more."""
    plan = of_two(MODEL, (90, 166))
    needs = [memory.total for memory in rank_memory(plan, on(SPEEDS))]
    assert needs[0] < needs[1]
    small, large = needs[0] - 1, 2 * needs[1]
    chips = of_speed(1, small), of_speed(1, large)
    nodes = zip(CHIPS, chips, strict=True)
    plain = on(SPEEDS)  # in whose order of nodes the plan is; a larger memory would come first
    cluster = replace(
        plain,
        nodes=tuple(replace(n, chip=c) for n, (_, c) in zip(plain.nodes, nodes, strict=True)),
    )
    with pytest.raises(PlanError, match=rf"on rank 0 \(chip {CHIPS[0]}\), which has"):
        check_memory(plan, cluster)
    simulation = simulate(plan, cluster)
    (said,) = simulation.overruns()
    assert "on rank 0 at" in said
    assert simulation.fullest_rank(0) == 0 and simulation.capacity_bytes(0) == small
    assert simulation.memory_bytes == needs


# ---------------------------------------------------------------- what is written and said


def test_a_plan_names_the_chip_of_each_group(tmp_path: Path) -> None:
    plan = unlike(plan_of(tiny_model(), (2, 2), (4, 1), (4, 2)), (6, 10))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    alike = cut(plan_of(tiny_model(), (4,), (1,), (2,)), {0: [(6, 10)]})
    write_plan(alike, tmp_path / "alike.json")
    assert "group_chips" not in (tmp_path / "alike.json").read_text()

    v, w, neutral = "v.toml", "w.toml", "neutral.toml"
    assert [plan.chip(rank) for rank in range(18)] == [v, v, w, w] * 4 + [neutral] * 2
    assert outline(plan).startswith("v.toml + w.toml 2 layers dp 4 tp 2 cp 2 of 6 + 10 tokens")
    assert chips_in_words(plan) == "2 neutral and 8 v and 8 w"
    figures = Figures()
    figures.of_plan(json.loads((tmp_path / "plan.json").read_text()))
    shown = figures.of({"peak_memory_bytes": list(range(18))})
    largest = {chip: shown[f"memory/largest of {chip}"] for chip in ("v", "w", "neutral")}
    assert largest == {"v": 13, "w": 15, "neutral": 17}


@pytest.mark.parametrize(
    ("shares", "chips"), [((6, 10), CHIPS[:1]), ((6, 10), (*CHIPS, "x.toml")), (None, CHIPS)]
)
def test_chips_that_are_not_those_of_the_groups_are_one_sentence(
    shares: Shares | None, chips: tuple[str, ...]
) -> None:
    plan = plan_of(tiny_model(), (4,), (1,), (2,))
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages

    def refused(chip: str) -> str:
        replica = replace(stage.replicas[0], chip=chip, token_shares=shares, group_chips=chips)
        stages = (replace(stage, replicas=(replica,)),)
        with pytest.raises(PlanError) as raised:
            validate(replace(plan, pipelines=(replace(pipeline, stages=stages),)))
        return str(raised.value)

    where = "pipelines[0].stages[0].replicas[0].group_chips"
    if shares is None:
        said = f"{where} is for a replica with token_shares; it has none"
        assert refused(chips[0]) == said
        return
    said = f"{where} is {json.dumps(chips)}".replace('"', "'")
    assert refused(chips[0]).startswith(f"{said}; expected one for each of its")
    assert "the first of them its chip, other.toml" in refused("other.toml")
