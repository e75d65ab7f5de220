"""The cost model against arithmetic by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from clusters import tiny_model

from ditorch.chips import load_chip
from heteropp.cluster import Link
from heteropp.cost import StageShape, all_gather_s, all_reduce_s, stage_memory, stage_time
from heteropp.trace import Trace, count

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)


def shape(**changes) -> StageShape:
    base = dict(
        layers=2,
        first=False,
        last=False,
        tp=1,
        dp=1,
        sequences=1,
        zero_stage=1,
        recompute=False,
    )
    return StageShape(**{**base, **changes})


def parameter_bytes(model, layers: int, tp: int = 1) -> int:
    """Of decoder layers in float32, each parameter padded to 128 bytes."""
    kv = model.kv_heads * model.head_size
    h, i = model.hidden, model.intermediate
    sizes = [h, h * h // tp, kv * h // tp, kv * h // tp, h * h // tp, h]
    sizes += [i * h // tp] * 3
    return layers * sum(-(-size // 32) * 32 for size in sizes) * 4


def test_operators_are_charged_by_the_rule() -> None:
    """2mnk for products, one an element otherwise, every distinct tensor's bytes once."""
    trace = Trace()
    a, b = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    count(trace, lambda: (a @ b).t().relu_().view(7, 3))
    product, relu = trace.operators
    assert (product.name, product.flops, product.bytes) == ("mm", 2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    assert (relu.name, relu.flops, relu.bytes) == ("relu_", 21, 4 * 21)


def test_a_stage_costs_the_same_for_every_further_layer() -> None:
    model, chip = tiny_model(8), load_chip("b-mini")
    times = [stage_time(model, shape(layers=n), chip, LINK, LINK) for n in (1, 2, 5)]
    step = times[1].forward_s - times[0].forward_s
    assert times[2].forward_s == pytest.approx(times[0].forward_s + 4 * step)
    assert times[0].recompute_s == 0
    again = stage_time(model, shape(recompute=True), chip, LINK, LINK)
    assert again.recompute_s == pytest.approx(again.forward_s)


def test_a_stage_on_a_chip_without_limits_costs_its_launches() -> None:
    model, chip = tiny_model(8), load_chip("b-mini")
    endless = replace(
        chip,
        compute=replace(chip.compute, launch_s=1.0, float32_flops=1e30),
        memory=replace(chip.memory, bandwidth_bytes_per_s=1e30),
    )
    forward_s = stage_time(model, shape(layers=1), endless, LINK, LINK).forward_s
    assert forward_s == pytest.approx(round(forward_s))
    assert 15 < forward_s < 40  # a decoder layer is some two dozen operators


def test_tensor_parallelism_pays_for_two_all_reduces_a_layer_and_direction() -> None:
    """Section 2.2: a transformer block's forward needs two all-reduces."""
    model, chip = tiny_model(8), load_chip("a-mini")
    slow = Link(latency_s=10.0, bytes_per_s=1e18)
    none = Link(latency_s=0.0, bytes_per_s=1e18)
    with_, without = (
        stage_time(model, shape(layers=3, tp=2), chip, link, none) for link in (slow, none)
    )
    assert with_.forward_s - without.forward_s == pytest.approx(3 * 2 * 10.0)
    assert with_.backward_s - without.backward_s == pytest.approx(3 * 2 * 10.0)


def test_collectives() -> None:
    assert all_reduce_s(1000, 1, LINK) == all_gather_s(1000, 1, LINK) == 0
    assert all_reduce_s(1000, 2, LINK) == pytest.approx(1e-3 + 1e-3)
    assert all_reduce_s(1e6, 4, LINK) == pytest.approx(2 * (1e-3 + 0.75))
    assert all_gather_s(1e6, 4, LINK) == pytest.approx(1e-3 + 0.75)


def test_memory_of_parameters_gradients_and_optimizer() -> None:
    model = tiny_model(8)
    memory = stage_memory(model, shape(layers=3), in_flight=1, micro_batches=4)
    expected = parameter_bytes(model, 3)
    assert memory.parameters == memory.gradients == expected
    assert memory.optimizer == 2 * expected
    assert memory.total == sum(
        getattr(memory, name)
        for name in (
            [
                "parameters",
                "gradients",
                "optimizer",
                "constants",
                "tokens",
                "kept",
                "working",
                "boundary",
            ]
        )
    )


def test_zero_1_cuts_the_optimizer_over_the_replicas() -> None:
    model = tiny_model(8)
    whole = stage_memory(model, shape(dp=4, zero_stage=0), 1, 4)
    cut = stage_memory(model, shape(dp=4), 1, 4)
    assert cut.optimizer == whole.optimizer // 4
    assert cut.gradients == whole.gradients + whole.gradients // 4  # the reduced shard


def test_micro_batches_in_flight_are_charged() -> None:
    model = tiny_model(8)
    one, three = (stage_memory(model, shape(), n, 4) for n in (1, 3))
    assert three.kept - one.kept == 2 * (three.kept // 2) > 0
    recomputed = stage_memory(model, shape(recompute=True), 3, 4)
    activation = model.sequence_length * model.hidden * 4
    assert recomputed.kept == 2 * activation < three.kept


ON_CHIP = """
import json, sys, torch, ditorch
from heteropp.hyperparameters import Hyperparameters
from heteropp.llama import StageModule
from heteropp.model import Model
from heteropp.optimizer import clip
from heteropp.trace import CountingGroup
from heteropp.zero import FlatParameters

model = Model(name="x", layers=3, hidden=64, heads=4, kv_heads=2, intermediate=192, vocab=256,
              sequence_length=64, dtype=sys.argv[1])
dtype = getattr(torch, model.dtype)

def account(run):
    torch.accelerator.synchronize()
    ditorch.pacing_reset()
    torch.accelerator.reset_peak_memory_stats()
    result = run()
    torch.accelerator.synchronize()
    return result, ditorch.pacing().busy_s

def report(layers, tp):
    first, last = layers[0] == 0, layers[1] == 3
    # a group that communicates nothing
    module = StageModule(model, layers, CountingGroup(tp), "device", dtype)
    module.initialise(0)
    flat = FlatParameters(module, None, 1, Hyperparameters())
    tokens = torch.zeros(128, dtype=torch.int64, device="device")
    x = tokens if first else torch.ones(128, 64, device="device", dtype=dtype).requires_grad_()
    held = torch.accelerator.memory_allocated() - (0 if first else x.nbytes)
    output, forward_s = account(lambda: module(x, tokens) / 128 if last else module(x))
    gradient = None if last else torch.ones(128, 64, device="device", dtype=dtype)
    _, backward_s = account(lambda: torch.autograd.backward(output, gradient))
    working = torch.accelerator.max_memory_allocated() - held

    norm = torch.ones((), device="device")

    def update():
        clip(flat.shard_gradient, norm, 1.0)
        flat.optimizer.update(flat.shard_gradient, 1e-3)
        flat.zero_gradients()

    _, norm_s = account(lambda: flat.norms(0))
    del output, gradient
    before = torch.accelerator.memory_allocated()
    _, update_s = account(update)
    working = max(working, torch.accelerator.max_memory_allocated() - before)
    shape = dict(layers=layers[1] - layers[0], first=first, last=last, tp=tp)
    print(json.dumps([shape, forward_s, backward_s, norm_s, update_s, working]))

for layers in ((0, 1), (1, 2), (1, 3)):
    for tp in (1, 2):
        report(layers, tp)
"""


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_stage_costs_what_the_emulated_chip_charges(dtype: str) -> None:
    """The chip's own account of time and memory, against the trace on meta tensors."""
    printed = subprocess.run(
        [sys.executable, "-c", ON_CHIP, dtype],
        env={**os.environ, "DITORCH_CHIP": "c-mini"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    shape_ = dict(hidden=64, heads=4, kv_heads=2, intermediate=192, vocab=256, sequence_length=64)
    model = tiny_model(3, **shape_, dtype=dtype)
    chip, none = load_chip("c-mini"), Link(latency_s=0.0, bytes_per_s=1e18)
    assert len(printed.splitlines()) == 6
    for line in printed.splitlines():
        what, forward_s, backward_s, norm_s, update_s, working = json.loads(line)
        stage = shape(**what, sequences=2)
        time = stage_time(model, stage, chip, none, none)
        assert time.forward_s == pytest.approx(forward_s, rel=1e-4), what
        assert time.backward_s == pytest.approx(backward_s, rel=1e-4), what
        assert time.norm_s == pytest.approx(norm_s, rel=1e-2), what  # a launch, to stack them
        assert time.update_s == pytest.approx(update_s, rel=1e-4), what
        assert working <= stage_memory(model, stage, 1, 4).working <= 1.1 * working, what
