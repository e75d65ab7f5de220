"""A plain language model, annotated: two pipelines of unlike stages train as one device does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hspmd_ranks import Ranks, train_plainly
from torch import Tensor, nn

from heteropp.layout.hspmd.annotation import DUPLICATE, Annotation
from heteropp.layout.hspmd.module import annotate
from heteropp.layout.hspmd.tensor import annotated, moved

WORLD = 5
VOCAB, HIDDEN, HEADS, LENGTH, SEQUENCES, STEPS = 12, 8, 2, 5, 6, 3
COPIES, ROWS, COLUMNS = {DUPLICATE: 2}, {0: 2}, {1: 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN)
        # a bias of all keys changes no score: Adam would make steps of its gradient's rounding
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.projection = nn.Linear(HIDDEN, HIDDEN)
        self.before_layers = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = *x.shape[:2], HEADS, HIDDEN // HEADS
        normal = self.before_attention(x)
        q, k, v = (
            layer(normal).view(heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.silu(self.up(self.before_layers(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.second(self.first(self.embedding(tokens))))
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), reduction="sum")
        return loss / targets.numel()


def lay_out(module: nn.Module) -> tuple[Annotation, Annotation]:
    """Pipeline one is ranks 0 and 3, which cut every layer, and takes two of three sequences;
    pipeline two is rank 1 for the first block, and ranks 4 and 2 for the second."""

    def early(
        first: dict[int, int], second: dict[int, int] | None = None, hdim: int = DUPLICATE
    ) -> Annotation:
        return Annotation.of([([0, 3], first), ([1], {})], hdim, [2, 1])

    def late(first: dict[int, int], second: dict[int, int], hdim: int = DUPLICATE) -> Annotation:
        return Annotation.of([([0, 3], first), ([4, 2], second)], hdim, [2, 1])

    parameters = {"embedding.weight": early(ROWS), "head.weight": late(COPIES, COPIES)}
    outputs = {"embedding": early(COPIES, hdim=0), "first": late(COPIES, COPIES, 0)}
    for block, stage in (("first", early), ("second", late)):
        copies = stage(COPIES, COPIES)
        for name in ("query", "key", "value", "up"):
            parameters[f"{block}.{name}.weight"] = stage(ROWS, ROWS)
            if name != "key":
                parameters[f"{block}.{name}.bias"] = stage(ROWS, ROWS)
        for name in ("projection", "down"):
            parameters[f"{block}.{name}.weight"] = stage(COLUMNS, COLUMNS)
            parameters[f"{block}.{name}.bias"] = copies
            outputs[f"{block}.{name}"] = stage(COPIES, COPIES, 0)
        for name in ("before_attention", "before_layers"):
            parameters[f"{block}.{name}.weight"] = copies
            # nothing moves forward; backward sums what the layers behind give of the gradient
            outputs[f"{block}.{name}"] = stage(COPIES, COPIES, 0)
    parameters["first.before_layers.bias"] = early(COPIES)
    parameters["second.before_layers.bias"] = late(COPIES, COPIES)
    annotate(module, parameters, outputs=outputs)
    return outputs["embedding"], outputs["first"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    text = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def one_device() -> tuple[list[float], dict[str, Tensor]]:
    module = LanguageModel()
    losses = train_plainly(module, 0.01, (batch(step) for step in range(STEPS)))
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def train(rank: int) -> tuple[list[float], float]:
    """The losses that a rank sees, and how far its parameters are from one device's."""
    module = LanguageModel()
    first, last = lay_out(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = module(annotated(tokens, first), annotated(targets, last))
        total = moved(loss.detach(), Annotation.of([([0, 3], COPIES), ([4, 2], COPIES)])).local
        if total is not None:
            losses.append(total.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    worst, expected = 0.0, one_device()[1]
    for name, parameter in module.named_parameters():
        part = annotated(expected[name], parameter.annotation).local
        if part is not None:
            worst = max(worst, (part - parameter.local).abs().max().item())
    return losses, worst


@pytest.mark.long
def test_a_language_model_trains_on_unlike_pipelines() -> None:
    ranks = Ranks(WORLD)
    try:
        answers = ranks.run(train)
    finally:
        ranks.close()
    expected = one_device()[0]
    assert [len(losses) for losses, _ in answers] == [STEPS, 0, STEPS, STEPS, STEPS]
    for losses, worst in answers:
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-12, abs=0)
        assert worst < 1e-12
