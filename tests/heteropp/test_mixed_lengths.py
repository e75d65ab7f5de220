"""Documents of mixed lengths in one step, under a plan for each length."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import plan_of
from parity import CLIP, RATE, STEPS, TOLERANCE, WARMUP, Ranks, Trained
from plain_llama import Attention, PlainLlama
from training_run import several_pipelines, tiny_model

from heteropp.data.source import open_tokens
from heteropp.data.token_file import TokenFile
from heteropp.data.whole_documents import WholeDocuments
from heteropp.model import Model
from heteropp.plan import Plan

SHORT, MIDDLE, LONG = 8, 16, 32
DOCUMENTS = 24  # of a step


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mostly short documents; some at the very limit of a sequence, some beyond the longest."""
    folder = tmp_path_factory.mktemp("documents")
    letters = random.Random(1)
    sizes = [letters.choice((2, 3, 5, 7, SHORT, SHORT, 9, 12, MIDDLE)) for _ in range(90)]
    sizes += [17, 20, 25, LONG, LONG, 33, 60]
    for n, size in enumerate(sizes):
        text = "".join(letters.choices(string.ascii_lowercase, range(26, 0, -1), k=size))
        (folder / f"{n:03}.txt").write_text(text)
    return folder


def of_length(plan: Plan, length: int, micro_batches: int | None = None) -> Plan:
    plan = replace(plan, model=replace(plan.model, sequence_length=length))
    (pipeline, *others) = plan.pipelines
    if micro_batches is None or others:
        return plan
    return replace(
        plan,
        global_batch=micro_batches * plan.micro_batch,
        pipelines=(replace(pipeline, micro_batches=micro_batches),),
    )


def plainly(model: Model, tokens: TokenFile, count: int, steps: int = STEPS) -> Trained:
    """A plain loop of one process, each document alone and as long as it is."""
    module = PlainLlama(model, seed=0)
    optimizer = torch.optim.AdamW(
        module.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    documents = WholeDocuments(tokens, model, seed=0)
    losses, norms = [], []
    for step in range(steps):
        rate = RATE[model.dtype] * min(1, (step + 1) / WARMUP)
        if step >= WARMUP:
            progress = (step - WARMUP) / (max(steps, STEPS) - WARMUP)
            rate *= 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=getattr(torch, model.dtype))
        for inputs, targets in texts(documents, range(step * count, (step + 1) * count)):
            loss = loss + F.cross_entropy(alone(module, inputs), targets, reduction="sum")
        mean = loss / documents.lengths(range(step * count, (step + 1) * count)).sum()
        mean.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item())
        optimizer.step()
        losses.append(mean.item())
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return Trained(losses, norms, parameters, 0.0, [], [], [], [])


def texts(
    documents: WholeDocuments, numbers: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number, length in zip(numbers, documents.lengths(numbers).tolist(), strict=True):
        inputs, targets, _ = documents.read([[number]], length)
        if length:
            yield torch.from_numpy(inputs), torch.from_numpy(targets).flatten()


def alone(module: PlainLlama, inputs: torch.Tensor) -> torch.Tensor:
    for part in module.modules():
        if isinstance(part, Attention):
            part.length = inputs.shape[1]
    return module(inputs)


def check(got: Trained, expected: Trained, tolerance: float) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.norms == pytest.approx(expected.norms, rel=tolerance)
    for name, value in expected.parameters.items():
        error = (got.parameters[name] - value).abs().max() / value.abs().max()
        assert error <= tolerance, f"{name}: {error:.3g}"


# by name: the plan of short sequences, and those of longer ones
def layouts(model: Model) -> dict[str, tuple[Plan, ...]]:
    four = replace(model, kv_heads=4)

    def plan(*degrees: Sequence[int], model: Model = model, **options: object) -> Plan:
        return plan_of(model, *degrees, **options)  # type: ignore[arg-type]

    return {
        "dp 4, then tp 4": (
            of_length(plan((4,), (4,), (1,), model=four), SHORT, 3),
            of_length(plan((4,), (1,), (4,), model=four), LONG, 1),
        ),
        "tp 2, then pipeline, then tp 4": (
            of_length(plan((4,), (2,), (2,), model=four), SHORT, 2),
            of_length(plan((1, 3), (1, 1), (2, 2), model=four), MIDDLE, 2),
            of_length(plan((4,), (1,), (4,), model=four, sequence_parallel=True), LONG, 1),
        ),
        "the same layout": (
            of_length(plan((3, 1), (2, 1), (1, 2), zero_stage=2), SHORT, 2),
            of_length(plan((3, 1), (2, 1), (1, 2)), MIDDLE, 2),
        ),
        "pipelines side by side": (
            of_length(
                several_pipelines(
                    replace(model, tied_embeddings=True),
                    ((1, 3), (1, 1), (1, 2), 2),
                    ((4,), (1,), (1,), 1),
                ),
                SHORT,
            ),
            of_length(
                plan((2, 2), (2, 1), (1, 2), model=replace(model, tied_embeddings=True)), LONG, 2
            ),
        ),
    }


CASES = list(layouts(tiny_model()))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_for_each_length_trains_what_each_document_alone_does(
    ranks: Ranks, data: Path, case: str, dtype: str
) -> None:
    plans = layouts(tiny_model(dtype=dtype))[case]
    model = plans[-1].model
    tokens = open_tokens(data, Path(ranks.folder.name, "cache", "hyperhetero"))
    got = ranks.train(plans[0], by_length=plans, documents=DOCUMENTS, data=data)
    check(got, plainly(model, tokens, DOCUMENTS), TOLERANCE[dtype])
