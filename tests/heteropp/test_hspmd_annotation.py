"""Annotations say what they cannot be in one sentence, and equal layouts are equal."""

from __future__ import annotations

from typing import Any

import pytest

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.annotation import (
    DUPLICATE,
    PARTIAL,
    Annotation,
    AnnotationError,
    DistributedStates,
    holdings,
)


def test_shares_may_be_unlike_at_the_top() -> None:
    """Hetu's figure 3 with rows 2 to 1: a group that cuts its columns, and a lone rank."""
    annotation = Annotation.of([([3, 1], {1: 2}), ([5], {})], hdim=0, shares=[2, 1])
    assert [(h.rank, h.box) for h in holdings(annotation, (6, 4))] == [
        (3, Box(((0, 4), (0, 2)))),
        (1, Box(((0, 4), (2, 4)))),
        (5, Box(((4, 6), (0, 4)))),
    ]


def test_equal_layouts_are_equal() -> None:
    assert DistributedStates.of([(0, 2), (0, 3), (1, 1)]) == DistributedStates.of({0: 6})
    pairs = [([0], {}), ([1], {})]
    assert Annotation.of(pairs, 0, [4, 2]) == Annotation.of(pairs, 0, [2, 1])
    assert Annotation.of(pairs[:1], PARTIAL) == Annotation.of(pairs[:1], DUPLICATE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([],), "has no subgroup"),
        (([([0, 1], {0: 3})],), "subgroup 0 has 2 ranks and distributed states {0: 3} of 3"),
        (([([0, 1], {0: 2}), ([1], {})],), "rank 1 is in the annotation twice"),
        (([([-1], {})],), "rank -1 is in the annotation; expected ranks from 0"),
        (([([0], {-3: 1})],), "1 parts along -3"),
        (([([0], {0: 0})],), "0 parts along 0"),
        (([([0], {}), ([1], {})], -3), "hdim is -3"),
        (([([0], {}), ([1], {})], 0, [1]), "shares is [1]; expected one of at least 1 for each"),
        (([([0], {}), ([1], {})], 0, [1, 0]), "shares is [1, 0]"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: Any, sentence: str) -> None:
    with pytest.raises(AnnotationError) as error:
        Annotation.of(*arguments)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("annotation", "sentence"),
    [
        (Annotation.of([([0, 1], {0: 2})]), "2 parts do not divide dimension 0 of size 3"),
        (Annotation.of([([0, 1], {2: 2})]), "splits dimension 2; a tensor [3, 4] has 2"),
        (
            Annotation.of([([0], {}), ([1], {})], 0, [1, 4]),
            "shares [1, 4] do not divide dimension 0 of a tensor [3, 4]; expected a multiple of 5",
        ),
        (Annotation.of([([0], {}), ([1], {})], 5), "splits dimension 5"),
    ],
)
def test_what_does_not_fit_a_tensor_is_one_sentence(annotation: Annotation, sentence: str) -> None:
    with pytest.raises(AnnotationError) as error:
        holdings(annotation, (3, 4))
    assert sentence in str(error.value)
