"""A user's own model, the one of examples/own_model.py: planned, trained, resumed, switched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from layouts import mixed_chips, plan_of, scheduled
from members import Members, whole
from parity import STEPS, TOLERANCE, Ranks, Trained
from sampled import sampled
from test_memory import chip
from training_run import several_pipelines

import heteropp
from heteropp.cost.planned import rank_memory
from heteropp.cost.stage_time import StageShape, stage_memory, stage_time
from heteropp.description.chips import load_chip
from heteropp.description.cluster import Link
from heteropp.description.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
SOURCE = f"{EXAMPLE}:model"
WIDTH = LENGTH = 64  # the example's


@cache  # it takes seconds to read, so only where a test asks for it
def own_model(dtype: str = "float64") -> Any:
    return replace(heteropp.read_model(SOURCE), dtype=dtype)  # type: ignore[arg-type]


def two_pipelines(model: Any) -> Plan:
    return several_pipelines(model, ((5, 3), (1, 1), (1, 2), 2), ((2, 6), (1, 1), (2, 1), 2))


PLANS: dict[str, Callable[[Any], Plan]] = {
    "1f1b": lambda m: plan_of(m, (3, 3, 2), (1, 2, 1), (2, 1, 4)),
    "gpipe": lambda m: scheduled(plan_of(m, (3, 5), (2, 1), (1, 2), zero_stage=2), "gpipe", 1),
    "zb-h1": lambda m: scheduled(plan_of(m, (5, 3), (1, 2), (4, 1)), "zb-h1", 1),
    "zb-v": lambda m: scheduled(plan_of(m, (4, 4), (2, 1), (1, 2), zero_stage=2), "zb-v", 2),
    "interleaved": lambda m: scheduled(plan_of(m, (4, 4), (1, 2), (2, 1)), "interleaved-1f1b", 2),
    "chimera": lambda m: scheduled(plan_of(m, (4, 4), (2, 1), (1, 2)), "chimera", 2),
    "offload": lambda m: scheduled(plan_of(m, (4, 4), (2, 1), (1, 2), offload=True), "gpipe", 2),
    "mixed chips": mixed_chips,
    "two pipelines": two_pipelines,
}


EVERYDAY = ("two pipelines",)
ON_CI = ("zb-h1", "mixed chips")  # besides


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in EVERYDAY:
        return ()
    return (pytest.mark.long if name in ON_CI else pytest.mark.exhaustive,)


CASES = [pytest.param(name, marks=marks(name)) for name in PLANS]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def check(got: Trained, plain: Trained, tolerance: float) -> None:
    assert got.losses == pytest.approx(plain.losses, rel=tolerance)
    assert got.norms == pytest.approx(plain.norms, rel=tolerance)
    assert got.validation_loss == pytest.approx(plain.validation_loss, rel=tolerance)
    assert got.parameters.keys() == plain.parameters.keys()
    for name, expected in plain.parameters.items():
        error = (got.parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_a_plain_loop_does(ranks: Ranks, name: str) -> None:
    plan = PLANS[name](own_model())
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float64"])


def test_ranks_alone_equal_the_plain_loop_bit_for_bit(ranks: Ranks) -> None:
    plan = plan_of(own_model(), (3, 5), (1, 1), (1, 1))
    got, plain = ranks.train(plan), ranks.plainly(plan)
    assert (got.losses, got.norms) == (plain.losses, plain.norms)
    for name, expected in plain.parameters.items():
        assert np.array_equal(got.parameters[name].numpy(), expected.numpy()), name


@pytest.mark.exhaustive
def test_a_tied_head_is_the_embedding(ranks: Ranks, tmp_path: Path) -> None:
    """It is in another stage than the embedding, or in the same."""
    text = EXAMPLE.read_text().replace("cut=cut,", f"cut=cut, tied={TIED},")
    (tmp_path / "tied.py").write_text(text)
    model: Any = replace(heteropp.read_model(f"{tmp_path / 'tied.py'}:model"), dtype="float64")
    for plan in (plan_of(model, (8,), (1,), (2,)), PLANS["zb-v"](model)):
        got = ranks.train(plan, 3)
        check(got, ranks.plainly(plan, 3), TOLERANCE["float64"])
        assert "head.logits.weight" not in got.parameters


def checkpointing(folder: Path, reentrant: bool, dtype: str) -> Any:
    """The example's model, each of whose blocks runs again in the backward."""
    forward = "    def forward(self, x: Tensor) -> Tensor:\n"
    again = f"        return checkpoint(self.run, x, use_reentrant={reentrant})\n\n"
    run = f"{forward}{again}    def run(self, x: Tensor) -> Tensor:\n"
    body = "        x = x + self.attention"
    text = EXAMPLE.read_text().replace(f"{forward}{body}", f"{run}{body}")
    assert again in text
    text = text.replace("\nclass", "\nfrom torch.utils.checkpoint import checkpoint\n\nclass", 1)
    (folder / "again.py").write_text(text)
    model: Any = replace(heteropp.read_model(f"{folder / 'again.py'}:model"), dtype=dtype)
    return model


@pytest.mark.parametrize(
    ("reentrant", "name"),
    [
        pytest.param(False, "zb-h1", marks=pytest.mark.exhaustive),
        pytest.param(False, "1f1b", marks=pytest.mark.exhaustive),
        pytest.param(True, "zb-h1", marks=pytest.mark.long),
    ],
)
def test_a_block_may_checkpoint_itself(
    ranks: Ranks, tmp_path: Path, reentrant: bool, name: str
) -> None:
    """Its forward is run again in a backward whose weight gradients are put off."""
    model = checkpointing(tmp_path, reentrant, "float64")
    plan = PLANS[name](model)
    check(ranks.train(plan, 3), ranks.plainly(plan, 3), TOLERANCE["float64"])


TIED = {"head.logits.weight": "embedding.tokens.weight"}


@pytest.mark.long
def test_it_resumes_under_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    first, second = PLANS["1f1b"](own_model()), two_pipelines(own_model())
    losses = ranks.train(first, 2, tmp_path).losses
    got = ranks.train(second, STEPS, tmp_path)
    plain = ranks.plainly(second)
    assert losses + got.losses == pytest.approx(plain.losses, rel=TOLERANCE["float64"])


@pytest.mark.parametrize(
    "tour",
    [
        pytest.param(("gpipe", *EVERYDAY), marks=pytest.mark.long),
        pytest.param(tuple(PLANS), marks=pytest.mark.exhaustive),
    ],
    ids=len,
)
def test_its_state_moves_from_plan_to_plan_while_it_trains(tour: tuple[str, ...]) -> None:
    members = Members(8, own_model(), len(tour))
    random, losses, before = Random(0), [], None
    try:
        for name in tour:
            plan = PLANS[name](own_model())
            told = members.train(plan, random.sample(members.names, plan.world_size), 1)
            came = whole(own_model(), {name: answer.came for name, answer in told.items()})
            for key, expected in (before or {}).items():
                assert np.array_equal(came[key], expected), key
            before = whole(own_model(), {name: answer.leaves for name, answer in told.items()})
            losses += next(iter(told.values())).losses
        assert losses == pytest.approx(members.plainly(16), rel=TOLERANCE["float64"])
    finally:
        members.close()


@pytest.mark.parametrize("name", CASES)
def test_its_memory_is_within_5_percent_below_the_predicted(chips: Ranks, name: str) -> None:
    plan = PLANS[name](own_model("float32"))
    peaks = chips.train(plan, 3).peak_memory_bytes
    for rank, (peak, memory) in enumerate(zip(peaks, rank_memory(plan), strict=True)):
        assert 0.95 * memory.total <= peak <= memory.total, rank


@pytest.mark.parametrize("name", sampled(["zb-h1", "1f1b"], 2))
def test_memory_is_not_short_where_blocks_checkpoint_themselves(
    chips: Ranks, tmp_path: Path, name: str
) -> None:
    """What its backwards put off is more than what its forwards keep."""
    plan = PLANS[name](checkpointing(tmp_path, False, "float32"))
    peaks = chips.train(plan, 3).peak_memory_bytes
    for peak, memory in zip(peaks, rank_memory(plan), strict=True):
        assert 0.9 * memory.total <= peak <= memory.total


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


ON_CHIP = """
import json, sys
from dataclasses import replace
import torch, ditorch, heteropp
from heteropp.cost.tracing.operators import CountingGroup
from heteropp.cost.tracing.stage import update
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.models.parallel.backward import put_off
from heteropp.optimizer.zero import FlatParameters

def busy_s(run):
    torch.accelerator.synchronize()
    ditorch.pacing_reset()
    result = run()
    torch.accelerator.synchronize()
    return result, ditorch.pacing().busy_s

spec = heteropp.read_model(sys.argv[1])
for dtype in ("float32", "float64", "bfloat16"):
    model = replace(spec, dtype=dtype)
    for layers in ((0, 3), (1, 2), (2, 3), (1, 6), (5, 8)):
        for tp in (1, 4):
            first, last = layers[0] == 0, layers[1] == model.layers
            group = CountingGroup(tp)  # which communicates nothing
            module = model.build(layers, group, "device", getattr(torch, dtype))
            module.initialise(0)
            flat = FlatParameters(module, None, 1, Hyperparameters())
            rows = 2 * model.sequence_length
            tokens = torch.zeros(rows, dtype=torch.int64, device="device")
            kind = dict(device="device", dtype=getattr(torch, dtype))
            x = tokens if first else torch.ones(rows, model.hidden, **kind).requires_grad_()
            with put_off() as later:
                output, forward_s = busy_s(
                    lambda: module(x, tokens) / rows if last else module(x)
                )
            gradient = None if last else torch.ones(rows, model.hidden, **kind)
            _, input_s = busy_s(lambda: torch.autograd.backward(output, gradient))
            _, weight_s = busy_s(later.run)
            flat.reduce()
            _, norm_s = busy_s(flat.norms)
            _, update_s = busy_s(lambda: update(flat))
            print(json.dumps([dtype, layers, tp, forward_s, input_s, weight_s, norm_s, update_s]))
"""


@pytest.mark.exhaustive
def test_its_stages_cost_what_the_emulated_chip_charges() -> None:
    """The chip's own account of time, against what one and two blocks of each kind predict."""
    printed = subprocess.run(
        [sys.executable, "-c", ON_CHIP, SOURCE],
        env={**os.environ, "DITORCH_CHIP": "c-mini"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.splitlines()
    none = Link(latency_s=0.0, bytes_per_s=1e18)
    assert len(printed) == 3 * 5 * 2
    for line in printed:
        dtype, (first, last), tp, *charged_s = json.loads(line)
        model = own_model(dtype)
        shape = StageShape(
            layers=last - first,
            first=first == 0,
            last=last == model.layers,
            tp=tp,
            dp=1,
            sequences=2,
            zero_stage=1,
            recompute=False,
            blocks=model.block_counts([(first, last)]),
        )
        time = stage_time(model, shape, load_chip("c-mini"), none, none)
        terms_s = time.forward_s, time.backward_input_s, time.backward_weight_s, time.norm_s
        # a chip keeps a norm's statistics of 16 bits in 16 bits, and the trace in 32
        tolerance = 2e-3 if dtype == "bfloat16" else 1e-4
        assert (*terms_s, time.update_s) == pytest.approx(charged_s, rel=tolerance), line
        assert stage_memory(model, shape, 1, 4).total > 0


FUSED_CALLS = {
    "query, key, value, is_causal=True": True,
    "query=query, key=key, value=value, is_causal=True": True,
    "query, key, value, None, 0.0, True": True,
    "query, key, value, None, 0.0, is_causal=True, scale=0.3": True,
    # PyTorch takes these apart: of three dimensions, and with a mask
    "*(each.flatten(0, 1) for each in (query, key, value)), is_causal=True": False,
    "query, key, value, attn_mask=self.mask": False,
}


def test_its_attention_may_be_called_in_every_way(tmp_path: Path) -> None:
    """A kernel's is planned as one, and masked products are no FLOPs of a step."""
    begin, end = "        scores = ", "        return self.output("
    text = EXAMPLE.read_text()
    before, after = text[: text.index(begin)], text[text.index(end) :]
    plain = own_model("float32")
    masked = 3 * 2 * 2 * 8 * WIDTH * (LENGTH - 1) / 2  # of a token, in 8 blocks
    kept_bytes = set()
    for i, (call, is_fused) in enumerate(FUSED_CALLS.items()):
        mixed = f"nn.functional.scaled_dot_product_attention({call}).view(value.shape)"
        path = tmp_path / f"call{i}.py"
        path.write_text(before + after.replace("(scores.softmax(-1) @ value)", f"{mixed}", 1))
        model: Any = replace(heteropp.read_model(f"{path}:model"), dtype="float32")
        saved = masked if is_fused else 0
        assert plain.flops_per_token() - model.flops_per_token() == pytest.approx(saved), call
        (memory,) = rank_memory(plan_of(model, (8,), (1,), (1,)))
        if is_fused:
            kept_bytes.add(memory.total)
        else:
            assert memory.total > max(kept_bytes), call
    assert len(kept_bytes) == 1


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_example_plans_and_trains_over_four_vendors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("predicted: ")
    output = tmp_path / "runs" / "own-model"
    plan = heteropp.read_plan(output / "starts" / "1" / "plan.json")
    chips = {replica.chip for stage in plan.pipelines[0].stages for replica in stage.replicas}
    assert {Path(name).stem.partition(".")[0] for name in chips} == {
        *("a-mini", "b-mini", "c-mini", "d-mini")
    }
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 20 and steps[-1]["loss"] < steps[0]["loss"] - 1


def test_the_example_is_short_and_imports_nothing_of_ours_but_the_package() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 80
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    ours = [line for line in imports if "hetero" in line or "torch" in line]
    assert [line for line in ours if not line.split()[1].startswith("torch")] == ["import heteropp"]


def test_the_package_is_imported_without_torch() -> None:
    code = (
        "import sys, heteropp; heteropp.ModelSpec; heteropp.plan; heteropp.simulate;"
        "heteropp.ModelDefinition; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert set(heteropp.__all__) == set(dir(heteropp))
    for name in heteropp.__all__:
        assert getattr(heteropp, name) is not None
