"""Experts that lie over ranks, in equal and unequal numbers, train what one process trains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from clusters import cluster_of
from layouts import MINISTAGES, SCHEDULES, plan_of, scheduled
from parity import STEPS, TOLERANCE, Ranks, Trained
from safetensors.torch import load_file, save_file
from sampled import sampled
from test_context_parallel import cut
from test_hugging_face_training import Decoder, compare
from test_hugging_face_training import check as check_decoder
from test_memory import check as check_memory
from test_memory import chip
from test_parity import check
from test_unlike_context_parallel import of_speed
from tiny_decoders import tiny_config, write_folder
from training_run import CHIP, Training, moved, tiny_model, write_cluster

from heteropp import expert_shares
from heteropp.cost.planned import rank_memory
from heteropp.description.outline import outline
from heteropp.description.plan import Plan, PlanError, Schedule, read_plan, validate, write_plan
from heteropp.frameworks.file import ExportError
from heteropp.frameworks.one_pipeline import single_pipeline
from heteropp.models.hugging_face.model import SPREADABLE, HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.models.spec import ModelError
from heteropp.simulator.simulate import simulate

Shares = Sequence[int]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@cache
def decoder(family: str = "qwen3_moe", dtype: str = "float64", layers: int = 4) -> HuggingFaceModel:
    """A family's tiny model, some layers of which have four experts."""
    values = tiny_config(family, layers=layers).to_dict()
    return read(values, family, sequence_length=16, dtype=dtype)


def spread(plan: Plan, shares: dict[int, Shares]) -> Plan:
    """Some stages of the first pipeline with expert parallelism."""
    first, *others = plan.pipelines
    stages = tuple(
        replace(stage, expert_shares=tuple(shares[s])) if s in shares else stage
        for s, stage in enumerate(first.stages)
    )
    return replace(plan, pipelines=(replace(first, stages=stages), *others))


def reversed_replicas(plan: Plan) -> Plan:
    """The last ranks of the first stage have the first sequences, and experts."""
    (pipeline,) = plan.pipelines
    first, *others = pipeline.stages
    first = replace(first, replicas=tuple(reversed(first.replicas)))
    return replace(plan, pipelines=(replace(pipeline, stages=(first, *others)),))


LAYOUTS: dict[str, Callable[[HuggingFaceModel], Plan]] = {
    "equal": lambda m: spread(plan_of(m, (4,), (2,), (1,)), {0: (2, 2)}),
    "unequal, then another": lambda m: spread(
        plan_of(m, (2, 2), (2, 3), (1, 1), shares={0: (1, 3), 1: (1, 1, 2)}),
        {0: (3, 1), 1: (1, 2, 1)},
    ),
    "two turns, ZeRO-2": lambda m: spread(
        plan_of(m, (2, 2), (4, 1), (1, 1), zero_stage=2), {0: (3, 1)}
    ),
    "replicas in another order": lambda m: spread(
        reversed_replicas(plan_of(m, (2, 2), (3, 1), (1, 1), shares={0: (1, 1, 2)})), {0: (2, 1, 1)}
    ),
    "with tp": lambda m: spread(plan_of(m, (2, 2), (1, 2), (2, 2)), {1: (1, 3)}),
    "sequence parallel": lambda m: spread(
        plan_of(m, (2, 2), (2, 1), (2, 1), sequence_parallel=True), {0: (1, 3)}
    ),
    "with cp": lambda m: spread(
        cut(plan_of(m, (2, 2), (1, 1), (2, 1)), {0: [(10, 6)]}), {0: (1, 3)}
    ),
    "with cp in replicas, 4 ways": lambda m: spread(
        cut(plan_of(m, (2, 2), (2, 1), (2, 1), zero_stage=0), {0: [(10, 6), (7, 9)]}), {0: (1,) * 4}
    ),
    "two turns of cp": lambda m: spread(
        cut(plan_of(m, (2, 2), (2, 1), (2, 1)), {0: [(10, 6)]}), {0: (3, 1)}
    ),
}


def alone(ranks: Ranks, plan: Plan) -> Trained:
    """What one device trains, and not transformers' own loop: norms and routers are in float32
    there, so that other sums of float64 may come out as another float32.

    For that reason sequence parallelism is held against itself, with all experts on each rank.
    """
    (pipeline,) = plan.pipelines
    if any(stage.sequence_parallel for stage in pipeline.stages):
        stages = tuple(replace(stage, expert_shares=None) for stage in pipeline.stages)
        return ranks.train(replace(plan, pipelines=(replace(pipeline, stages=stages),)))
    whole = plan_of(plan.model, (plan.model.layers,), (1,), (1,))
    micro_batches = plan.global_batch // whole.micro_batch
    same = replace(whole.pipelines[0], micro_batches=micro_batches)
    whole = replace(whole, global_batch=plan.global_batch, pipelines=(same,))
    return ranks.train(replace(whole, optimizer=plan.optimizer))


EVERYDAY = ("unequal, then another", "replicas in another order", "two turns of cp")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.long) for n in LAYOUTS],
)
def test_it_trains_what_one_device_does(ranks: Ranks, layout: str) -> None:
    plan = LAYOUTS[layout](decoder())
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


def of_schedule(schedule: Schedule) -> Plan:
    plan = plan_of(decoder(), (2, 2), (2, 3), (1, 1), shares={0: (1, 3), 1: (1, 1, 2)})
    plan = scheduled(plan, schedule, MINISTAGES.get(schedule, 1))
    return spread(plan, {0: (3, 1), 1: (1, 2, 1)})


@pytest.mark.parametrize(
    "schedule",
    sampled(["zb-h1", *(s for s in SCHEDULES if s != "zb-h1")], 3, everyday=1),
)
def test_every_schedule(ranks: Ranks, schedule: Schedule) -> None:
    """The second stage recomputes; Chimera's and ZB-V's stages hold layers at both ends."""
    plan = of_schedule(schedule)
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.long
def test_muon_trains_experts_elsewhere_as_on_one_device(ranks: Ranks) -> None:
    """Hidden matrices are Muon's, and experts' stacks AdamW's."""
    plan = replace(LAYOUTS["two turns, ZeRO-2"](decoder()), optimizer="muon")
    muon = {"optimizer": "muon"}
    whole = replace(plan_of(decoder(), (4,), (1,), (1,)), optimizer="muon")
    got, expected = (ranks.train(each, settings=muon) for each in (plan, whole))
    assert got.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.long
def test_pipelines_with_and_without_sum_the_gradients_of_experts(ranks: Ranks) -> None:
    """Each expert's gradient is summed over those alone that hold it, however they are cut."""
    one = spread(plan_of(decoder(), (2, 2), (2, 1), (1, 2)), {0: (3, 1)}).pipelines[0]
    other = plan_of(decoder(), (1, 3), (1, 1), (2, 1)).pipelines[0]
    pipelines = replace(one, micro_batches=2), replace(moved(other, 4), micro_batches=3)
    plan = replace(plan_of(decoder(), (4,), (1,), (1,)), global_batch=20, pipelines=pipelines)
    whole = replace(plan_of(decoder(), (4,), (1,), (1,)), global_batch=20)
    (pipeline,) = whole.pipelines
    whole = replace(whole, pipelines=(replace(pipeline, micro_batches=5),))
    check(ranks.train(plan), ranks.train(whole), TOLERANCE["float64"])


@pytest.mark.parametrize("family", sampled(SPREADABLE, 2))
def test_families_of_transformers(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """What transformers' own loop trains, in float32: with biases, shared experts, latent heads."""
    folder = tmp_path / family
    write_folder(folder, family, noise=0.05, layers=4)
    values = json.loads((folder / "config.json").read_text())
    model = read(values, family, sequence_length=32)
    plan = plan_of(model, (2, 2), (2, 2), (1, 2), shares={0: (1, 3)}, zero_stage=2)
    compare(ranks, spread(plan, {0: (3, 1), 1: (1, 3)}), Decoder(model, folder))


def with_idle_routers(folder: Path, **sizes: int) -> Path:
    """Every token of a tiny qwen3_moe goes to the first two experts: none to the others."""
    write_folder(folder, "qwen3_moe", noise=0.05, layers=4, **sizes)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        if name.endswith(".mlp.gate.weight"):
            value.zero_()
    save_file(weights, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "where", [pytest.param("ranks", marks=pytest.mark.long), pytest.param("chips")]
)
def test_a_rank_that_is_given_all_rows_and_one_that_is_given_none(
    request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    own: Ranks = request.getfixturevalue(where)
    folder = with_idle_routers(tmp_path / "idle")
    values = json.loads((folder / "config.json").read_text())
    model = read(values, "idle", sequence_length=32)
    plan = spread(plan_of(model, (4,), (2,), (1,), zero_stage=0), {0: (2, 2)})
    whole = plan_of(model, (4,), (1,), (1,))
    got, expected = (own.train(each, 2, weights=folder) for each in (plan, whole))
    check_decoder(got, expected)


def test_a_run_goes_on_from_its_checkpoint_with_other_shares(ranks: Ranks, tmp_path: Path) -> None:
    """Experts by halves follow on uneven ones, and all on one rank on that."""
    plans = [LAYOUTS["two turns, ZeRO-2"](decoder()), LAYOUTS["equal"](decoder())]
    whole = plan_of(decoder(), (4,), (1,), (1,))
    losses = [
        loss
        for steps, plan in ((2, plans[0]), (4, plans[1]), (STEPS, whole))
        for loss in ranks.train(plan, steps, checkpoints=tmp_path).losses
    ]
    assert losses == pytest.approx(alone(ranks, plans[0]).losses, rel=TOLERANCE["float64"])


# ---------------------------------------------------------------- what it costs


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Chips compute with kernels of their own, exactly enough."""
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


def balanced(**changes: Any) -> HuggingFaceModel:
    """Every token goes to all experts, so that each of them has as many rows as is assumed."""
    sizes = dict(hidden_size=128, moe_intermediate_size=128, vocab_size=512, head_dim=32)
    sizes |= dict(num_experts_per_tok=4, decoder_sparse_step=1) | changes
    values = tiny_config("qwen3_moe", layers=4, **sizes).to_dict()
    return read(values, "balanced", sequence_length=128)


MEASURED: dict[str, Callable[[HuggingFaceModel], Plan]] = {
    "unequal": lambda m: spread(
        plan_of(m, (2, 2), (2, 1), (1, 1), shares={0: (1, 3)}), {0: (1, 3)}
    ),
    "two turns, zb-h1": lambda m: scheduled(
        spread(plan_of(m, (2, 2), (4, 1), (1, 1)), {0: (3, 1)}), "zb-h1", 1
    ),
    "ZeRO-2, with tp, zb-v": lambda m: scheduled(
        spread(plan_of(m, (2, 2), (2, 1), (2, 1), zero_stage=2), {0: (1, 3)}), "zb-v", 2
    ),
    "with cp, ZeRO-0": lambda m: spread(
        cut(plan_of(m, (2, 2), (2, 1), (2, 1), zero_stage=0), {0: [(72, 56)]}), {0: (1, 1, 1, 1)}
    ),
    "ZeRO-2, each expert once": lambda m: spread(
        plan_of(m, (4,), (2,), (1,), zero_stage=2), {0: (3, 1)}
    ),
    "Muon": lambda m: replace(spread(plan_of(m, (4,), (2,), (1,)), {0: (2, 2)}), optimizer="muon"),
    "bfloat16": lambda m: spread(
        plan_of(replace(m, dtype="bfloat16"), (2, 2), (2, 1), (1, 1)), {0: (3, 1)}
    ),
}


@pytest.mark.parametrize("name", sampled(MEASURED, 6))
def test_a_peak_is_within_5_percent_below_the_predicted(chips: Ranks, name: str) -> None:
    check_memory(chips, MEASURED[name](balanced()))


@pytest.mark.long
def test_what_passes_each_link_are_the_rows_that_go_there_and_back(tmp_path: Path) -> None:
    """Other numbers of experts leave alike all else that heteropp-train counts on two nodes."""
    model, sequences = balanced(), (1, 3)

    def sent_bytes(shares: Shares) -> dict[str, int]:
        plan = plan_of(model, (4,), (2,), (1,), shares={0: sequences}, zero_stage=0)
        folder = tmp_path / f"{shares[0]}"
        folder.mkdir()
        write_cluster(folder, 1)
        with (folder / "cluster.toml").open("a") as file:
            file.write(f'[[nodes]]\nchip = "{CHIP}"\n')
        Training(folder, spread(plan, {0: shares}), "--steps", "2").finish()
        *_, last = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        found: dict[str, int] = json.loads(last)["sent_bytes"]
        assert len(found) == 2
        return found

    def rows(shares: Shares) -> int:
        """Returns those of a layer's forward: each way, those sent there and those sent back."""
        (one, other), (few, many) = sequences, shares
        return (one * many + other * few) * model.sequence_length

    by_shares = {shares: sent_bytes(shares) for shares in ((1, 3), (3, 1))}
    micro_batches = 4
    of_row = 2 * model.hidden * 4 * model.layers * micro_batches  # forward and backward
    fewer, more = by_shares.values()
    for link, size_bytes in fewer.items():
        assert more[link] - size_bytes == (rows((3, 1)) - rows((1, 3))) * of_row


SPEEDS = 1.0, 2.0
COSTLY = dict(
    hidden_size=64,
    moe_intermediate_size=512,
    num_experts=6,
    num_local_experts=6,
    num_experts_per_tok=6,
)


def on(plan: Plan, speeds: Sequence[float], bandwidth: float = 1e12) -> float:
    """Returns the step's seconds on chips of these speeds, one a rank, that differ in name too."""
    nodes = []
    for i, speed in enumerate(speeds):
        own = of_speed(speed)
        links = replace(own.links, nic_bytes_per_s=bandwidth, nic_latency_s=0)
        nodes.append((f"{i}.toml", replace(own, links=links), 1))
    return simulate(plan, cluster_of(*nodes)).step_s


def of_two(shares: Shares | None) -> Plan:
    """One stage of two replicas, with sequences by SPEEDS."""
    plan = plan_of(balanced(**COSTLY), (4,), (2,), (1,), shares={0: (1, 2)}, zero_stage=0)
    return plan if shares is None else spread(plan, {0: shares})


@pytest.mark.exhaustive
def test_experts_by_speed_are_as_fast_as_any_and_equal_ones_far_behind() -> None:
    found = {n: on(of_two((n, 6 - n)), SPEEDS) for n in range(1, 6)}
    best = expert_shares(of_two(None).model, SPEEDS)
    assert best == (2, 4)
    assert found[2] == min(found.values())
    assert found[3] > 1.2 * found[2]
    # wherever experts are, as much is computed, but that rows are sorted, and fewer are updated
    assert found[2] == pytest.approx(on(of_two(None), SPEEDS), rel=0.1)


@pytest.mark.long
def test_a_stage_waits_for_its_slowest_attention_and_for_its_slowest_experts() -> None:
    """A chip of speed 3 has three of four experts, and its rest waits for that of the other chip:
    a step takes as long as if both were of speed 1 and had one expert each.
    """
    four = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 4)
    model = balanced(**COSTLY | four)
    plan = plan_of(model, (4,), (2,), (1,), zero_stage=0)
    three, two = (on(spread(plan, {0: shares}), (1, 1)) for shares in ((3, 1), (2, 2)))
    of_one_expert = three - two
    found = on(spread(plan, {0: (3, 1)}), (3, 1))
    assert found == pytest.approx(two - of_one_expert, rel=0.01)


def test_rows_there_and_back_are_charged() -> None:
    """Every token goes to all six experts, in float32: there and back, and their gradients."""
    plan = of_two((3, 3))
    slower = (on(plan, (1, 1), 1e6) - on(plan, (1, 1), 1e7)) / (1 / 1e6 - 1 / 1e7)
    model = plan.model
    rows = 2 * model.sequence_length * 6 / 2  # of the larger replica, half of them to the other
    routed = 4 * rows * model.hidden * 4 * model.layers * plan.pipelines[0].micro_batches
    whole = sum(math.prod(p.shape) for p in model.parameters() if not model.is_of_experts(p))
    gradients = 4 * whole  # in a ring of two, what both of them hold
    assert slower == pytest.approx(routed + gradients, rel=0.01)


@pytest.mark.exhaustive
def test_places_sum_what_ranks_keep_of_experts() -> None:
    """The largest share decides how long two pipelines sum, where ranks have experts of others."""
    one = plan_of(balanced(**COSTLY), (4,), (2,), (1,), zero_stage=0)

    def summed_s(shares: Shares | None) -> float:
        own = one if shares is None else spread(one, {0: shares})
        (pipeline,) = own.pipelines
        several = (pipeline, moved(pipeline, 2))
        plan = replace(own, global_batch=2 * own.global_batch, pipelines=several)
        validate(plan)
        found = simulate(plan, cluster_of(("x", of_speed(1), 4)))
        return max(group.seconds for group in found.program.groups if len(group.members) == 4)

    model = one.model
    experts = sum(math.prod(p.shape) for p in model.parameters() if model.is_of_experts(p))
    part = experts / sum(math.prod(p.shape) for p in model.parameters())
    for shares in ((1, 5), (3, 3)):
        expected = 1 - part + part * max(shares) / 6
        assert summed_s(shares) / summed_s(None) == pytest.approx(expected, rel=0.05)


def test_experts_take_the_memory_of_those_that_have_them() -> None:
    (few, many), (whole, _) = (rank_memory(of_two(shares)) for shares in ((1, 5), None))
    model = of_two(None).model
    experts = sum(math.prod(p.shape) * 4 for p in model.parameters() if model.is_of_experts(p))
    assert few.parameters == pytest.approx(whole.parameters - experts * 5 / 6, rel=0.01)
    assert many.optimizer == pytest.approx(whole.optimizer - 2 * experts / 6, rel=0.01)


# ---------------------------------------------------------------- what is written and said


def test_a_plan_says_where_experts_lie(tmp_path: Path) -> None:
    plan = LAYOUTS["two turns, ZeRO-2"](decoder())
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert "dp 4 tp 1 ep 2 of 3 + 1 experts" in outline(plan)
    whole = plan_of(decoder(), (4,), (2,), (1,))
    write_plan(whole, tmp_path / "whole.json")
    assert "expert_shares" not in (tmp_path / "whole.json").read_text()


def refused(plan: Plan) -> str:
    with pytest.raises(PlanError) as raised:
        validate(plan)
    return str(raised.value)


def test_shares_that_do_not_go_with_the_stage_are_one_sentence() -> None:
    plan = plan_of(decoder(), (4,), (4,), (1,))
    where = "pipelines[0].stages[0].expert_shares"
    for shares in ((4,), (2, 1, 1)):
        said = f"{where} is {list(shares)}; expected two shares or more, in a number that divides"
        assert refused(spread(plan, {0: shares})).startswith(said)
    for shares in ((4, 0), (2, 3)):
        said = f"{where} is {list(shares)}; expected numbers of experts above 0 that sum to the"
        assert refused(spread(plan, {0: shares})).startswith(said)
    dense = plan_of(tiny_model(), (4,), (2,), (1,))
    assert "of family llama has no experts" in refused(spread(dense, {0: (1, 1)}))
    other = plan_of(decoder("glm4_moe"), (4,), (2,), (1,))
    assert "experts of glm4_moe cannot lie over ranks; those of mixtral" in refused(
        spread(other, {0: (2, 2)})
    )


def test_what_does_not_know_such_plans_yet_says_so() -> None:
    plan = LAYOUTS["equal"](decoder())
    with pytest.raises(ExportError, match="the plan has expert_shares"):
        single_pipeline(plan)


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ((1.0, math.nan), "speeds is [1.0, nan]; expected those of at least two ranks"),
        ((1.0,), "speeds is [1.0]; expected those of at least two ranks, all above 0"),
        ((1.0, 0.0), "speeds is [1.0, 0.0]; expected those of at least two ranks, all above 0"),
        ((1.0,) * 5, "the model's 4 experts are too few for 5 ranks, of which each holds one at"),
    ],
)
def test_speeds_that_experts_do_not_go_with_are_one_sentence(
    speeds: Sequence[float], said: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        expert_shares(decoder(), speeds)
