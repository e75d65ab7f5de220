"""A module written for one device, annotated, trains on unlike groups as it does on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hspmd_ranks import Ranks, train_plainly
from torch import nn

from heteropp.layout.hspmd.annotation import DUPLICATE, PARTIAL, Annotation, AnnotationError
from heteropp.layout.hspmd.module import annotate
from heteropp.layout.hspmd.resolution import resolve
from heteropp.layout.hspmd.tensor import annotated, moved

WORLD = 6
STEPS = 4
LEARNING_RATE = 0.05
SHARES = [2, 1]  # of the rows


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


class TwoLayers(nn.Module):
    """Two products with Gelu between them, as in Hetu's figure 9."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 12, dtype=torch.float64)
        self.second = nn.Linear(12, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(F.gelu(self.first(x))), target)


@dataclass
class Layout:
    x: Annotation
    target: Annotation
    parameters: dict[str, Annotation]
    used: dict[str, Annotation] = field(default_factory=dict)
    inputs: dict[str, Annotation] = field(default_factory=dict)
    outputs: dict[str, Annotation] = field(default_factory=dict)


def union(first: dict[int, int], second: dict[int, int], hdim: int = DUPLICATE) -> Annotation:
    """Ranks 0 and 3, and rank 1 alone: where the first layer is."""
    shares = SHARES if hdim == 0 else None
    return Annotation.of([([0, 3], first), ([1], second)], hdim, shares)


def later(first: dict[int, int], second: dict[int, int], hdim: int = DUPLICATE) -> Annotation:
    """Ranks 0 and 3 still, and ranks 5 and 2 behind rank 1: where the second layer is."""
    shares = SHARES if hdim == 0 else None
    return Annotation.of([([0, 3], first), ([5, 2], second)], hdim, shares)


COPIES = {DUPLICATE: 2}
LAYOUTS = {
    # sums of the first product are reduce-scattered in one group, sent on in the other, and its
    # weight is gathered slice by slice from halves that the groups hold (ZeRO)
    "figure 9": Layout(
        x=union({1: 2}, {}, 0),
        target=later({0: 2}, {0: 2}, 0),
        parameters={
            "first.weight": Annotation.of([([0, 3], {1: 2}), ([1], {})], 0, [1, 2]),
            "first.bias": union(COPIES, {}),
            "second.weight": later(COPIES, COPIES),
            "second.bias": later(COPIES, COPIES),
        },
        used={"first.weight": union({1: 2}, {})},
        outputs={"first": later({0: 2}, {0: 2}, 0)},
    ),
    # Megatron's cut: columns, then rows, whose sums are all-reduced in each group
    "columns and rows": Layout(
        x=union(COPIES, {}, 0),
        target=later(COPIES, COPIES, 0),
        parameters={
            "first.weight": union({0: 2}, {}),
            "first.bias": union({0: 2}, {}),
            "second.weight": later({1: 2}, {1: 2}),
            "second.bias": later(COPIES, COPIES),
        },
        inputs={"second": later({1: 2}, {1: 2}, 0)},
        outputs={"second": later(COPIES, COPIES, 0)},
    ),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)


def one_device() -> tuple[list[float], dict[str, torch.Tensor]]:
    module = TwoLayers()
    losses = train_plainly(module, LEARNING_RATE, (batch(step) for step in range(STEPS)))
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def train(rank: int, name: str) -> tuple[list[float], float]:
    """The losses that a rank sees, and how far its parameters are from one device's."""
    layout = LAYOUTS[name]
    module = TwoLayers()
    annotate(module, layout.parameters, layout.used, layout.inputs, layout.outputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        x, target = batch(step)
        loss = module(annotated(x, layout.x), annotated(target, layout.target))
        total = moved(loss.detach(), later(COPIES, COPIES)).local
        if total is not None:
            losses.append(total.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    worst = 0.0
    expected = one_device()[1]
    for long_name, parameter in module.named_parameters():
        name = long_name.replace("parametrizations.", "").replace(".original", "")
        part = annotated(expected.pop(name), layout.parameters[name]).local
        assert (part is None) == (parameter.local is None)
        if part is not None:
            worst = max(worst, (part - parameter.local).abs().max().item())
    assert not expected
    return losses, worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_layers_cut_unlike_train_as_on_one_device(ranks: Ranks, name: str) -> None:
    expected = one_device()[0]
    answers = ranks.run(train, name)
    assert [bool(losses) for losses, _ in answers] == [
        rank in (0, 2, 3, 5) for rank in range(WORLD)
    ]
    for losses, worst in answers:
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-12, abs=0)
        assert worst < 1e-12


def test_figure_9_communicates_as_the_paper_says() -> None:
    layout = LAYOUTS["figure 9"]
    before = union({PARTIAL: 2}, {}, 0)
    kinds = partial(resolve, itemsize=8)
    weight = kinds(layout.parameters["first.weight"], layout.used["first.weight"], (12, 8))
    assert weight.kinds == [["split-all-gather"]]
    activation = kinds(before, layout.outputs["first"], (6, 12))
    assert activation.kinds == [["reduce-scatter", "batched send/recv"]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parameters": {}}, r"parameter \S+ has no annotation; expected one for each"),
        ({"used": {"third.weight": union(COPIES, {})}}, "third.weight is annotated"),
        ({"inputs": {"third": union(COPIES, {})}}, "submodule third is annotated"),
    ],
)
def test_what_a_module_lacks_is_named(change: dict[str, dict], sentence: str) -> None:
    arguments = {"parameters": LAYOUTS["figure 9"].parameters, **change}
    with pytest.raises(AnnotationError, match=sentence):
        annotate(TwoLayers(), **arguments)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def test_tied_parameters_are_one_sentence() -> None:
    with pytest.raises(AnnotationError) as error:
        annotate(Tied(), {"first.weight": union(COPIES, {})})
    assert str(error.value) == (
        "parameters first.weight and second.weight are tied; expected one name for each"
    )


def run_frozen(_rank: int) -> tuple[bool, bool, str]:
    """Whether a frozen weight and its bias get gradients, and what keywords alone are told."""
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    lies = union(COPIES, {})
    annotate(module, {"0.weight": lies, "0.bias": lies}, inputs={"0": lies})
    x = annotated(torch.ones(2, 4), lies)
    module(x).sum().backward()
    with pytest.raises(AnnotationError) as error:
        module[0](input=x)
    return module[0].weight.grad is None, module[0].bias.grad is None, str(error.value)


def test_a_frozen_parameter_gets_no_gradient_and_keywords_alone_are_refused(ranks: Ranks) -> None:
    told = (
        "submodule 0 has an annotated input and is called with keywords only; expected its first "
        "argument by position"
    )
    assert ranks.run(run_frozen) == [(True, False, told)] * WORLD
