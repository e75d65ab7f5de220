"""Operators on annotated tensors: the same as on one device, or a clear error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hspmd_ranks import Ranks

from heteropp.layout.hspmd.annotation import DUPLICATE, PARTIAL, Annotation, AnnotationError
from heteropp.layout.hspmd.deduction import DeductionError, without_sums
from heteropp.layout.hspmd.tensor import (
    AnnotatedTensor,
    annotated,
    communicate,
    gradient_moved,
    moved,
)

WORLD = 4
GROUPS = ([[0, 1, 2, 3]], [[2, 0], [1, 3]], [[3], [0, 1]], [[1], [0, 2, 3]])
TRIES = 40  # annotations by operator
TOKENS = torch.tensor([[0, 3, 5, 1], [7, 2, 2, 6], [4, 4, 0, 3], [1, 5, 7, 2]])
CLASSES = torch.tensor([0, 3, 1, 5, 2, 2, 4, 0, 1, 3, 5, 4])

# what is run, and the shapes of its operands
Case = tuple[Callable[..., Any], list[tuple[int, ...]]]
CASES: dict[str, Case] = {
    "add": (lambda x, y: x + y, [(12, 6), (12, 6)]),
    "broadcast": (lambda x, y: x * y, [(12, 6), (6,)]),
    "product": (lambda x, y: x * y, [(12, 6), (12, 6)]),
    "gelu": (lambda x: F.gelu(x) * 2, [(12, 6)]),
    "silu": (F.silu, [(12, 6)]),
    "relu": (F.relu, [(12, 6)]),
    "tanh": (lambda x: x.tanh() / 3 - 1, [(12, 6)]),
    "matmul": (lambda x, w: x @ w, [(12, 6), (6, 12)]),
    "batched matmul": (lambda x, y: x @ y, [(4, 6, 12), (4, 12, 6)]),
    "matmul of three and two": (lambda x, w: x @ w, [(4, 6, 12), (12, 6)]),
    "linear": (F.linear, [(12, 6), (12, 6), (12,)]),
    "sum": (lambda x: x.sum(), [(12, 6)]),
    "sum of rows": (lambda x: x.sum(0), [(12, 6)]),
    "mean": (lambda x: x.mean(1, keepdim=True), [(12, 6)]),
    "mean of all": (lambda x: x.mean(), [(12, 6)]),
    "flatten": (lambda x: x.reshape(24, 12), [(4, 6, 12)]),
    "unflatten": (lambda x: x.view(12, 2, 6), [(12, 12)]),
    "transpose": (lambda x: x.t() * 2, [(12, 6)]),
    "permute": (lambda x: x.permute(2, 0, 1), [(4, 6, 12)]),
    "unsqueeze": (lambda x: x.unsqueeze(1).squeeze(1), [(12, 6)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(12, 6), (6,), (6,)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w), [(12, 6), (6,)]),
    "softmax": (lambda x: F.softmax(x, -1), [(12, 6)]),
    "log softmax": (lambda x: F.log_softmax(x, 0), [(6, 12)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(4, 6, 3, 2), (4, 6, 3, 2), (4, 6, 3, 2)],
    ),
    "squared error": (F.mse_loss, [(12, 6), (12, 6)]),
    "sum of squared errors": (
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        [(12, 6), (12, 6)],
    ),
}
TAKES_NUMBERS: dict[str, tuple[Case, torch.Tensor]] = {
    "embedding": ((lambda w, tokens: F.embedding(tokens, w), [(8, 6)]), TOKENS),
    "cross entropy": (
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), [(12, 6)]),
        CLASSES,
    ),
}
EVERY = {**CASES, **{name: case for name, (case, _) in TAKES_NUMBERS.items()}}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def random_annotation(
    random: Random, groups: list[list[int]], shares: list[int], dimensions: int
) -> Annotation:
    roles = [DUPLICATE, *range(dimensions)] if random.random() < 0.7 else [DUPLICATE]
    subgroups = []
    for group in groups:
        parts = [2, 2] if len(group) == 4 else [len(group)]
        subgroups.append((group, [(random.choice(roles), n) for n in parts]))
    return Annotation.of(subgroups, random.choice(roles), shares)


def copies(annotation: Annotation) -> Annotation:
    return Annotation.of([(group, {DUPLICATE: len(group)}) for group in annotation.groups])


def run_operator(_rank: int, name: str) -> Counter[str]:
    """Tries random annotations of the operands; forward and backward must be one device's."""
    run, shapes = EVERY[name]
    numbers = TAKES_NUMBERS[name][1] if name in TAKES_NUMBERS else None
    torch.manual_seed(3)
    whole = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    plain = run(*whole, *([] if numbers is None else [numbers]))
    weights = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weights).sum(), whole)
    random = Random(name)
    seen: Counter[str] = Counter()
    for _ in range(TRIES):
        groups = random.choice(GROUPS)
        shares = [random.randint(1, 2) for _ in groups]
        operands = [*whole, *([] if numbers is None else [numbers])]
        try:
            annotations = [random_annotation(random, groups, shares, t.ndim) for t in operands]
            if random.random() < 0.5:  # operands alike go together more often
                annotations = [
                    annotations[0] if t.ndim == operands[0].ndim else a
                    for t, a in zip(operands, annotations, strict=True)
                ]
            parts = [annotated(t, a) for t, a in zip(operands, annotations, strict=True)]
        except ValueError:  # it does not fit the shape
            continue
        leaves = [part.requires_grad_() for part in parts[: len(whole)]]
        try:
            result = run(*leaves, *parts[len(whole) :])
        except DeductionError as error:
            assert "insert a communication operator" in str(error) or "cannot make" in str(error)
            seen["refused"] += 1
            continue
        assert isinstance(result, AnnotatedTensor)
        seen["partial" if result.annotation.partial else "whole"] += 1
        summed = moved(result.detach(), without_sums(result.annotation))
        check(moved(summed, copies(result.annotation)), plain)
        (result * annotated(weights, without_sums(result.annotation))).sum().backward()
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert isinstance(leaf.grad, AnnotatedTensor)
            check(gradient_moved(leaf.grad, leaf.annotation), gradient)
    return seen


def check(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    assert isinstance(tensor, AnnotatedTensor) and tensor.shape == whole.shape
    part = annotated(whole, tensor.annotation).local
    if part is None:
        assert tensor.local is None
        return
    assert tensor.local.shape == part.shape
    assert torch.allclose(tensor.local, part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_forward_and_backward_are_those_of_one_device(ranks: Ranks, name: str) -> None:
    seen = ranks.run(run_operator, name)
    assert all(answer == seen[0] for answer in seen)
    assert seen[0]["whole"] + seen[0]["partial"] >= 3, seen[0]


def run_mistakes(_rank: int) -> list[str]:
    """What a user is told, by mistake."""
    rows = Annotation.of([([0, 1], {0: 2}), ([2, 3], {0: 2})], 0)
    one_group = Annotation.of([([0, 1, 2, 3], {0: 4})])
    columns = Annotation.of([([0, 1], {1: 2}), ([2, 3], {1: 2})], 1)
    x = annotated(torch.ones(12, 12), rows)
    labels = annotated(torch.zeros(12, dtype=torch.int64), rows)
    mistakes: list[Callable[[], Any]] = [
        lambda: x + annotated(torch.ones(12, 12), columns),
        lambda: x + torch.ones(12, 12),
        lambda: annotated(torch.ones(12, 12), one_group).add_(x),
        lambda: F.dropout(x, 0.5),
        lambda: F.cross_entropy(x, labels),
        lambda: torch.linalg.inv(x),
    ]
    copied = Annotation.of([([0, 1, 2, 3], {DUPLICATE: 4})])
    square, row = annotated(torch.ones(12, 12), copied), annotated(torch.ones(12), copied)
    summands = annotated(torch.ones(12, 12), Annotation.of([([0, 1, 2, 3], {1: 4})])).sum(1)
    table = annotated(torch.ones(8, 6), Annotation.of([([0, 1, 2, 3], {0: 4})]))
    mistakes += [
        lambda: torch.addmm(row, square, square, beta=2),
        lambda: torch.addmm(row, square, square, alpha=0.5),
        lambda: torch.addmm(square, square, square),
        lambda: torch.tensor(2.0) / summands,
        lambda: F.embedding(annotated(torch.tensor([0, 8]), copied), table),
        lambda: F.embedding(annotated(torch.tensor([-1, 7]), copied), table),
        lambda: x @ torch.ones(12, 12),
        lambda: F.cross_entropy(x, labels, row, reduction="sum"),
        lambda: torch.ones(12, 12).copy_(x),
        lambda: torch.tensor(1.0).copy_(square.sum()),
        lambda: annotated(torch.ones(0, 4), copied).reshape(2, 0),
        lambda: F.embedding(labels, table, scale_grad_by_freq=True),
    ]
    far = Annotation.of([([0, WORLD], {0: 2})])
    mistakes += [
        lambda: communicate(torch.ones(12, 12), rows),
        lambda: communicate(x, far),
        lambda: annotated(torch.ones(4), Annotation.of([([0, 1], {PARTIAL: 2})])),
    ]
    sentences = []
    for mistake in mistakes:
        with pytest.raises((DeductionError, AnnotationError, IndexError)) as error:
            mistake()
        sentences.append(str(error.value))
    return sentences


def test_mistakes_are_one_sentence(ranks: Ranks) -> None:
    told = ranks.run(run_mistakes)[0]
    unlike, plain, in_place, drawn, mean, unknown, *told, unannotated, far, parted = told
    assert unlike == (
        "add cannot take its operand 'other' [12, 12] as [0, 1] {1: 2}, [2, 3] {1: 2} with hdim 1 "
        "in shares [1, 1]: expected split along dimension 0 where its operand 'self' [12, 12] is "
        "split along dimension 0; insert a communication operator before it"
    )
    assert "add takes a plain tensor [12, 12] beside annotated ones" in plain
    assert "add_ would make" in in_place and "of what lies as [0, 1, 2, 3] {0: 4}" in in_place
    assert "is no operator that annotated tensors can take so" in drawn
    assert "expected reduction='sum', and a division by all rows" in mean
    assert "is no operator that annotated tensors can take so" in unknown
    beta, alpha, two, divided, high, low, weight, classes, copied, number, empty, counted = told
    assert beta == (
        "addmm takes a bias [12] with beta 2 and alpha 1; expected a bias [12], and both 1"
    )
    assert "with beta 1 and alpha 0.5" in alpha and "takes a bias [12, 12]" in two
    assert "div cannot take its operand 'other' [12]" in divided and "not summands" in divided
    assert high == "embedding takes tokens 0 to 8; expected 0 to 7"
    assert low == "embedding takes tokens -1 to 7; expected 0 to 7"
    assert "mm takes a plain tensor [12, 12] beside annotated ones" in weight
    assert "takes weights of classes; expected none" in classes
    assert "copy_ takes a plain tensor [12, 12]" in copied and "a plain tensor []" in number
    assert "takes an empty tensor [0, 4]" in empty
    assert counted.endswith("by how often one rank has a token; expected scale_grad_by_freq=False")
    assert unannotated.startswith("a plain tensor [12, 12] cannot go to")
    assert far.startswith("rank 4 is in the annotation") and far.endswith("expected ranks 0 to 3")
    assert "expected no summands" in parted


def run_bias_over_more_groups(rank: int) -> float | None:
    x = annotated(torch.ones(1, 4), Annotation.of([([0, 1], {1: 2})]))
    weight = annotated(torch.ones(4, 1), Annotation.of([([0, 1], {0: 2})]))
    bias = annotated(torch.ones(1), Annotation.of([([0], {}), ([1], {})]))
    result = torch.addmm(bias, x, weight)
    assert isinstance(result, AnnotatedTensor) and result.annotation.hdim == PARTIAL
    return None if result.local is None else result.local.item()


def test_a_bias_over_more_groups_is_added_once(ranks: Ranks) -> None:
    assert ranks.run(run_bias_over_more_groups) == [3, 2, None, None]  # 4 and the bias


def run_mean_as(_rank: int) -> list[bool]:
    x = annotated(torch.arange(12).reshape(4, 3), Annotation.of([([0, 1, 2, 3], {0: 4})]))
    result = x.mean(1, dtype=torch.float64)
    assert isinstance(result, AnnotatedTensor) and result.local is not None
    thirds = annotated(torch.full((4, 1), 1 / 3), x.annotation).mean(1, dtype=torch.float64)
    return [
        result.local.dtype == result.dtype == torch.float64,
        thirds.local.dtype == thirds.dtype == torch.float64,
    ]


def test_a_mean_is_of_the_type_asked_for(ranks: Ranks) -> None:
    assert ranks.run(run_mean_as) == [[True, True]] * WORLD
