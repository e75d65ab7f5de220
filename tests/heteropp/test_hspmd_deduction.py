"""What operators make of annotations, and what they say where operands do not go together."""

from __future__ import annotations

import pytest

from heteropp.layout.hspmd.annotation import DUPLICATE, PARTIAL, Annotation
from heteropp.layout.hspmd.deduction import (
    DeductionError,
    Operand,
    OperatorRule,
    attention,
    deduce,
    elementwise,
    embedding,
    loss,
    matmul,
    normalisation,
    reduction,
    reshape,
    softmax,
    transpose,
)

Axes = dict[int, int] | list[tuple[int, int]]


def group(axes: Axes) -> Annotation:
    return Annotation.of([([0, 1, 2, 3], axes)])


def union(hdim: int, first: Axes, second: Axes, shares: list[int] | None = None) -> Annotation:
    return Annotation.of([([0, 1], first), ([2, 3], second)], hdim, shares)


def of(operator: OperatorRule, shape: tuple[int, ...], *operands: Annotation) -> Annotation:
    named = [Operand(f"tensor {'xyz'[k]}", a) for k, a in enumerate(operands)]
    return deduce(operator, named, [shape])[0]


DOT = matmul("Dot", 2, 2)


def test_a_product_turns_a_split_into_a_sum() -> None:
    """Figure 2: both split along what is summed over."""
    assert of(DOT, (12, 12), group({1: 4}), group({0: 4})) == group({PARTIAL: 4})


def test_a_product_of_three_dimensions_and_two() -> None:
    """Figure 11: batch, columns and the summed dimension are laid out over one group."""
    dot = matmul("Dot", 3, 2)
    x = Annotation.of([(range(8), [(0, 2), (2, 2), (DUPLICATE, 2)])])
    w = Annotation.of([(range(8), [(DUPLICATE, 2), (0, 2), (1, 2)])])
    expected = Annotation.of([(range(8), [(0, 2), (PARTIAL, 2), (2, 2)])])
    assert of(dot, (4, 4, 4), x, w) == expected
    top = union(0, {2: 2}, {DUPLICATE: 2}, [2, 1]), union(DUPLICATE, {0: 2}, {1: 2})
    assert of(dot, (6, 4, 4), *top) == union(0, {PARTIAL: 2}, {2: 2}, [2, 1])


def test_axes_are_cut_where_operands_need_it() -> None:
    result = of(DOT, (12, 12), group({0: 4}), group([(DUPLICATE, 4)]))
    assert result == group({0: 4})
    result = of(DOT, (12, 12), group([(0, 2), (DUPLICATE, 2)]), group([(DUPLICATE, 2), (1, 2)]))
    assert result == group([(0, 2), (1, 2)])


def test_one_group_goes_with_a_union() -> None:
    """Figure 10: the operand with fewer subgroups is read with as many."""
    result = of(DOT, (12, 12), group({0: 4}), union(DUPLICATE, {DUPLICATE: 2}, {DUPLICATE: 2}))
    assert result == union(0, {0: 2}, {0: 2})


def test_shares_are_kept() -> None:
    x = union(1, {0: 2}, {DUPLICATE: 2}, [1, 2])
    assert of(transpose("transpose", (1, 0)), (12, 12), x) == union(
        0, {1: 2}, {DUPLICATE: 2}, [1, 2]
    )
    joined = reshape("view", (6, 4, 5), (24, 5))
    x = union(0, {DUPLICATE: 2}, {0: 2}, [1, 2])
    assert of(joined, (24, 5), x) == x
    assert of(reduction("sum", 2, [0], False), (12,), union(0, {1: 2}, {1: 2}, [1, 2])) == union(
        PARTIAL, {0: 2}, {0: 2}
    )


def test_summands_pass_what_is_linear() -> None:
    x = union(PARTIAL, {0: 2}, {1: 2})
    copies = union(DUPLICATE, {0: 2}, {1: 2})
    assert of(transpose("transpose", (1, 0)), (12, 12), x) == union(PARTIAL, {1: 2}, {0: 2})
    assert of(elementwise("add", [(12, 12)] * 2, additive=True), (12, 12), x, x) == x
    assert of(elementwise("mul", [(12, 12)] * 2, {0, 1}), (12, 12), x, copies) == x


def test_a_split_vocabulary_makes_a_sum() -> None:
    result = of(embedding("embedding", 1), (12, 12), group({0: 4}), group({DUPLICATE: 4}))
    assert result == group({PARTIAL: 4})


def test_a_loss_sums_over_rows() -> None:
    rows = union(0, {0: 2}, {DUPLICATE: 2}, [2, 1])
    assert of(loss("loss"), (), rows, rows) == union(PARTIAL, {PARTIAL: 2}, {DUPLICATE: 2})


@pytest.mark.parametrize(
    ("operator", "operands", "sentence"),
    [
        (
            DOT,
            (group({1: 4}), group({DUPLICATE: 4})),
            "Dot cannot take its tensor y as [0, 1, 2, 3] {duplicate: 4}: expected split along "
            "dimension 0 where its tensor x is split along dimension 1; insert a communication "
            "operator before it",
        ),
        (
            elementwise("Gelu", [(12, 12)]),
            (group({PARTIAL: 4}),),
            "Gelu cannot take its tensor x as [0, 1, 2, 3] {partial: 4}: expected its values, "
            "not summands of them; insert a communication operator before it",
        ),
        (
            elementwise("add", [(12, 12)] * 2, additive=True),
            (group({PARTIAL: 4}), group({DUPLICATE: 4})),
            "add cannot take its tensor x",
        ),
        (
            elementwise("add", [(12, 12)] * 2),
            (group({0: 4}), group({1: 4})),
            "add cannot take its tensor y as [0, 1, 2, 3] {1: 4}: expected split along dimension 0",
        ),
        (
            elementwise("add", [(12, 12)] * 2),
            (union(0, {1: 2}, {1: 2}, [1, 2]), union(0, {1: 2}, {1: 2}, [2, 1])),
            "expected shares [1, 2] as its tensor x has",
        ),
        (
            elementwise("add", [(12, 12)] * 2),
            (group({0: 4}), Annotation.of([([0, 1], {0: 2})])),
            "expected the groups [0, 1, 2, 3] of its tensor x",
        ),
        (softmax("softmax", 2, 1), (group({1: 4}),), "expected dimension 1 whole"),
        (normalisation("norm", 2, 1), (group({1: 4}), group({0: 4}), group({0: 4})), "1 whole"),
        (attention("attention", 4), (group({2: 4}),) * 3, "expected dimension 2 whole"),
        (loss("loss"), (group({1: 4}), group({DUPLICATE: 4})), "expected dimension 1 whole"),
        (reshape("view", (3, 4, 4), (12, 4)), (group({1: 4}),), "expected dimension 1 whole"),
    ],
)
def test_where_a_communication_operator_is_missing(
    operator: OperatorRule, operands: tuple[Annotation, ...], sentence: str
) -> None:
    with pytest.raises(DeductionError) as error:
        of(operator, (12, 12), *operands)
    assert sentence in str(error.value)
    assert str(error.value).endswith("insert a communication operator before it")
