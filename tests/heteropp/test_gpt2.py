"""GPT-2: its folders, its stages and its training, against transformers' own model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import plan_of, scheduled
from parity import CLIP, RATE, STEPS, TOLERANCE, WARMUP, Ranks
from sampled import sampled
from test_hugging_face import LENGTH, our_logits
from test_memory import chip
from training_run import several_pipelines

import heteropp
from heteropp.cost.planned import rank_memory
from heteropp.data.sequences import Sequences
from heteropp.data.source import open_tokens
from heteropp.data.targets import NOT_COUNTED
from heteropp.layout.boxes import Box
from heteropp.state.hugging_face.export import export
from heteropp.state.hugging_face.weights import Weights, check_from

# an odd vocabulary is not cut
KINDS: dict[str, dict[str, Any]] = {
    "even": {"vocab_size": 256},
    "odd": {"vocab_size": 257},
    "wide": {"vocab_size": 256, "n_inner": 48, "activation_function": "gelu_pytorch_tanh"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    made = {}
    for kind, changes in KINDS.items():
        torch.manual_seed(0)
        config = GPT2Config(
            **{"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64},
            **{"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2, **changes},
        )
        module = GPT2LMHeadModel(config)
        for name, parameter in module.named_parameters():
            if "ln_" in name or "bias" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # else they cannot be told apart
        made[kind] = tmp_path_factory.mktemp("folder") / kind
        if kind == "wide":  # as the hub has it: without the head, and without its prefix
            assert isinstance(module.transformer, GPT2Model)
            module.transformer.save_pretrained(made[kind])
        else:
            module.save_pretrained(made[kind])
    return made


def theirs(folder: Path) -> Any:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("layout", ["tp 2", "pp 3", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(folders: dict[str, Path], kind: str, layout: str) -> None:
    if kind == "odd" and layout == "tp 2":
        layout = "uneven"
    tokens = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(folders[kind])(tokens).logits.flatten(0, 1)
    ours = our_logits(folders[kind], tokens, layout)
    if kind == "odd":  # every rank of the last stage has all of them
        ours = ours[:, : expected.shape[1]]
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_back_is_the_same_model(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    model = heteropp.read_model(folders[kind])
    weights = Weights(folders[kind], model)
    check_from(folders[kind], model)
    export(
        model,
        lambda parameter: weights.read(parameter, Box.whole(parameter.shape)),
        tmp_path / "copy",
        file_bytes=20_000,
    )
    before, after = (theirs(each).state_dict() for each in (folders[kind], tmp_path / "copy"))
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    assert replace(heteropp.read_model(tmp_path / "copy"), name=model.name) == model


def test_what_our_model_has_no_form_of_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    text = (folders["even"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"gelu_new"', '"relu"'))
    with pytest.raises(heteropp.FileError, match="activation_function is 'relu'; expected 'gelu_"):
        heteropp.read_model(tmp_path)
    with pytest.raises(heteropp.FileError, match="sequence_length is 80; the model learns 64 pos"):
        heteropp.read_model(folders["even"], 80)
    with pytest.raises(heteropp.FileError, match="the model is of another family; expected llama"):
        check_from(folders["even"], heteropp.read_model("quickstart"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def plans(model: Any) -> list[Any]:
    return [
        plan_of(model, (1, 2, 1), (1, 2, 1), (2, 1, 4)),
        scheduled(plan_of(model, (2, 2), (2, 1), (1, 2), zero_stage=2), "zb-v", 2),
        several_pipelines(model, ((3, 1), (1, 1), (1, 2), 2), ((1, 3), (1, 1), (2, 1), 2)),
    ]


@pytest.mark.parametrize(
    ("vocab", "number"),
    sampled([(256, 0), (257, 1), (256, 2), (256, 1), (257, 0), (257, 2)], 5, everyday=1),
)
def test_it_trains_as_transformers_does(
    ranks: Ranks, tmp_path: Path, vocab: int, number: int
) -> None:
    """Every loss and gradient norm, from our initial values, which it loads."""
    plan = plans(tiny(vocab))[number]
    got = ranks.train(plan)
    values = dict(plan.model.initial_values((0, plan.model.layers), 0))
    export(plan.model, lambda parameter: values[parameter.name], tmp_path / "folder")
    module = theirs(tmp_path / "folder").double()
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    sequences = Sequences(open_tokens(ranks.data, tmp_path), plan.model, 0)
    losses, norms = [], []
    for step in range(STEPS):
        rate = RATE["float64"] * min(1, (step + 1) / WARMUP)
        if step >= WARMUP:
            progress = (step - WARMUP) / (STEPS - WARMUP)
            rate *= 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        numbers = range(step * plan.global_batch, (step + 1) * plan.global_batch)
        inputs, targets = map(torch.from_numpy, sequences.read(numbers))
        optimizer.zero_grad()
        logits = module(inputs).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss = loss / int((targets != NOT_COUNTED).sum())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    assert got.losses == pytest.approx(losses, rel=TOLERANCE["float64"])
    assert got.norms == pytest.approx(norms, rel=TOLERANCE["float64"])


def tiny(vocab: int = 256, dtype: str = "float64") -> Any:
    from heteropp.models.gpt2.model import GPT2Model

    return GPT2Model(
        name="tiny",
        layers=4,
        hidden=32,
        heads=4,
        intermediate=64,
        vocab=vocab,
        positions=24,
        sequence_length=16,
        dtype=dtype,  # type: ignore[arg-type]
    )


@pytest.mark.exhaustive
def test_its_memory_is_within_5_percent_below_the_predicted(tmp_path: Path) -> None:
    chips = Ranks(chip(tmp_path, 1 << 30))
    try:
        model = replace(tiny(dtype="float32"), hidden=128, intermediate=512, vocab=512)
        for plan in plans(model)[:2]:
            peaks = chips.train(plan, 3).peak_memory_bytes
            for rank, (peak, memory) in enumerate(zip(peaks, rank_memory(plan), strict=True)):
                assert 0.95 * memory.total <= peak <= memory.total, rank
    finally:
        chips.close()


def test_its_presets_are_planned() -> None:
    plan = heteropp.plan("gpt2", "autohet-4a100-4h800", global_batch=8, planner="exact")
    assert plan.model.family == "gpt2" and plan.model.tp_degrees(64) == [1, 2, 4]
    assert heteropp.simulate(plan, "autohet-4a100-4h800").step_s > 0
