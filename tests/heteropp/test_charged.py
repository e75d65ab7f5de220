"""The cost model against what an emulated chip charges, by its own account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from clusters import tiny_model
from pydantic import TypeAdapter
from test_cost import shape
from tiny_decoders import tiny_config

from ditorch.chips import load_chip
from heteropp.cost.stage_time import (
    stage_memory,
    stage_time,
)
from heteropp.description.cluster import Link
from heteropp.models.hugging_face.lora import with_lora
from heteropp.models.hugging_face.reading import read
from heteropp.models.spec import ModelSpec

ON_CHIP = """
import json, sys
from heteropp.description.chips import load_chip  # before the chip is opened
assert "torch" not in sys.modules
chip = load_chip("c-mini")
import torch, ditorch, ditorch.chips
assert ditorch.chips.load_chip("c-mini") == chip and type(chip) is ditorch.chips.ChipSpec
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.models.parallel.backward import put_off
from heteropp.models.stage_module import StageModule
from heteropp.models.llama.model import LlamaModel
from heteropp.optimizer.adamw import clip
from heteropp.cost.tracing.operators import CountingGroup
from heteropp.optimizer.zero import FlatParameters

SHAPE = dict(layers=3, hidden=64, heads=4, kv_heads=2, intermediate=192, vocab=256,
             sequence_length=64)

def account(run):
    torch.accelerator.synchronize()
    ditorch.pacing_reset()
    torch.accelerator.reset_peak_memory_stats()
    result = run()
    torch.accelerator.synchronize()
    return result, ditorch.pacing().busy_s

def report(model, layers, tp, **options):
    dtype = getattr(torch, model.dtype)
    first, last = layers[0] == 0, layers[1] == 3
    # a group that communicates nothing
    group = CountingGroup(tp, options.get("sequence_parallel", False))
    again = options.get("selective_recompute", False)
    module = model.build(layers, group, "device", dtype, selective_recompute=again)
    module.initialise(0)
    optimizer = options.get("optimizer", "adamw")
    flat = FlatParameters(module, None, 1, Hyperparameters(optimizer=optimizer))
    tokens = torch.zeros(128, dtype=torch.int64, device="device")
    rows = 128 // tp if group.sequence_parallel else 128
    x = tokens if first else torch.ones(rows, 64, device="device", dtype=dtype).requires_grad_()
    held = torch.accelerator.memory_allocated() - (0 if first else x.nbytes)
    with put_off() as later:
        output, forward_s = account(lambda: module(x, tokens) / 128 if last else module(x))
    gradient = None if last else torch.ones(rows, 64, device="device", dtype=dtype)
    _, input_s = account(lambda: torch.autograd.backward(output, gradient))
    working = torch.accelerator.max_memory_allocated() - held
    _, weight_s = account(later.run)
    working = max(working, torch.accelerator.max_memory_allocated() - held)
    if first:  # the model's first stage puts nothing off
        del output
        output = module(x, tokens)
        account(lambda: torch.autograd.backward(output, gradient))
        working = torch.accelerator.max_memory_allocated() - held

    norm = torch.ones((), device="device")

    def update():
        clip(flat.reduced(), norm, 1.0)
        flat.optimizer.update(flat.reduced(), 1e-3)
        flat.begin()

    flat.reduce()
    _, norm_s = account(flat.norms)
    del output, gradient
    before = torch.accelerator.memory_allocated()
    _, update_s = account(update)
    working = max(working, torch.accelerator.max_memory_allocated() - before)
    shape = dict(layers=layers[1] - layers[0], first=first, last=last, tp=tp, **options)
    changes = dict(dtype=model.dtype)
    changes |= {key: getattr(model, key) for key in ("dropout", "attention") if hasattr(model, key)}
    print(json.dumps([changes, shape, forward_s, input_s, weight_s, norm_s, update_s, working]))

"""
OF_LLAMAS = """
for dtype in sys.argv[1:]:
    for layers in ((0, 1), (1, 2), (1, 3)):
        for tp in (1, 2):
            report(LlamaModel(name="x", dtype=dtype, **SHAPE), layers, tp)
"""
OF_VARIANTS = """
for layers in ((0, 1), (1, 2), (1, 3)):
    dropping = LlamaModel(name="x", dropout=0.1, **SHAPE)
    report(dropping, layers, 1, selective_recompute=True)
    report(dropping, layers, 2, sequence_parallel=True)
    for tp in (1, 2):
        report(LlamaModel(name="x", **SHAPE), layers, tp, optimizer="muon")
        report(LlamaModel(name="x", attention="fused", **SHAPE), layers, tp)
"""


OF_MODELS = """
from pathlib import Path
from pydantic import TypeAdapter
from heteropp.models.spec import ModelSpec
for text in sys.argv[1:]:
    for layers in ((0, 1), (1, 2), (1, 3)):
        for tp in (1, 2):
            report(TypeAdapter(ModelSpec).validate_json(text), layers, tp)
"""


CHARGED: dict[str, Any] = dict(
    hidden=64, heads=4, kv_heads=2, intermediate=192, vocab=256, sequence_length=64
)


def charged(script: str, *arguments: str) -> list[str]:
    """What the emulated chip says of stages, a line each."""
    return subprocess.run(
        [sys.executable, "-c", ON_CHIP + script, *arguments],
        env={**os.environ, "DITORCH_CHIP": "c-mini"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.splitlines()


@pytest.mark.parametrize(
    "dtypes", [("bfloat16",), pytest.param(("float32", "float64"), marks=pytest.mark.long)]
)
def test_a_stage_costs_what_the_emulated_chip_charges(dtypes: tuple[str, ...]) -> None:
    """The chip's own account of time and memory, against the trace on meta tensors."""
    lines = charged(OF_LLAMAS, *dtypes)
    assert len(lines) == len(dtypes) * 6
    compare(lines, lambda changes: tiny_model(3, **CHARGED, **changes))


@pytest.mark.exhaustive
def test_so_do_its_variants() -> None:
    """Dropout with selective recompute and sequence parallelism, Muon, fused attention."""
    lines = charged(OF_VARIANTS)
    assert len(lines) == 18
    compare(lines, lambda changes: tiny_model(3, **CHARGED, **changes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_so_does_one_with_frozen_weights(dtype: str) -> None:
    values = tiny_config("qwen2", layers=3, hidden_size=64, intermediate_size=192).to_dict()
    whole = read(values, "x", sequence_length=64, dtype=dtype)
    model = with_lora(whole, "r=8,targets=k_proj+down_proj")
    lines = charged(OF_MODELS, TypeAdapter(ModelSpec).dump_json(model).decode())
    assert len(lines) == 6
    # the first half of a backward through transformers' rotary angles is traced less exactly
    compare(lines, lambda _: model, of_backward=0.02)


@pytest.mark.exhaustive
def test_so_does_attention_through_a_window_in_one_kernel() -> None:
    values = tiny_config("mistral", layers=3, hidden_size=64, intermediate_size=192).to_dict()
    assert values["sliding_window"] == 8
    model = replace(read(values, "x", sequence_length=64), attention="fused")
    lines = charged(OF_MODELS, TypeAdapter(ModelSpec).dump_json(model).decode())
    assert len(lines) == 6
    compare(lines, lambda _: model, of_backward=0.03)  # as above


def compare(
    lines: list[str], model_of: Callable[[dict], ModelSpec], of_backward: float = 1e-4
) -> None:
    chip, none = load_chip("c-mini"), Link(latency_s=0.0, bytes_per_s=1e18)
    for line in lines:
        changes, what, forward_s, input_s, weight_s, norm_s, update_s, working = json.loads(line)
        model, stage = model_of(changes), shape(**what, sequences=2)
        time = stage_time(model, stage, chip, none, none)
        assert time.forward_s == pytest.approx(forward_s, rel=1e-4), line
        assert time.backward_input_s == pytest.approx(input_s, rel=of_backward), line
        assert time.backward_weight_s == pytest.approx(weight_s, rel=1e-4), line
        assert time.norm_s == pytest.approx(norm_s, rel=1e-2), line  # a launch, to stack them
        assert time.update_s == pytest.approx(update_s, rel=1e-4), line
        assert working <= stage_memory(model, stage, 1, 4).working <= 1.1 * working, line
