"""Assemblies of slices, against the same torch functions on the tensors themselves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.models.assembly import Assembly

SOURCES = {
    "a": torch.randn(6, 4),
    "b": torch.randn(6, 4),
    "scalar": torch.randn(()),
    "experts": torch.randn(3, 12, 4),
}
Made = Callable[[dict], Tensor]
MADE: dict[str, Made] = {
    "as it is": lambda of: of["a"],
    "a scalar": lambda of: of["scalar"],
    "stacked": lambda of: torch.stack([of["a"], of["b"]], dim=0),
    "stacked at the end": lambda of: torch.stack([of["a"], of["b"]], -1),
    "gates and ups of experts": lambda of: torch.cat(
        [torch.stack([of["a"], of["b"], of["a"]]), torch.stack([of["b"], of["b"], of["a"]])], dim=1
    ),
    "an expert": lambda of: torch.chunk(of["experts"], 3, dim=0)[1].squeeze(0),
    "an expert's half, turned": lambda of: torch.transpose(
        torch.chunk(torch.chunk(of["experts"], 2, dim=1)[1], 3, dim=0)[2].squeeze(0), 0, 1
    ).contiguous(),
    "unequal pieces": lambda of: torch.split(of["experts"], [2, 3, 7], dim=1)[1],
    "a piece over two": lambda of: torch.transpose(
        torch.cat([of["experts"], of["experts"]], dim=1), -1, 0
    ).chunk(3, 1)[1],
    "one of a stack": lambda of: (
        torch.split(torch.stack([of["a"], of["b"]], dim=2), [1, 2, 3], dim=0)[2]
        .chunk(2, dim=2)[1]
        .squeeze(2)
        .transpose(0, 1)
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_boxes_are_those_of_the_tensor_and_no_more_is_read(kind: str) -> None:
    expected = MADE[kind](SOURCES)
    found: Assembly = MADE[kind](
        {name: Assembly.of(name, value.shape) for name, value in SOURCES.items()}
    )
    assert found.shape == tuple(expected.shape)
    read: list[int] = []

    def fetch(name: str, box: Box) -> Tensor:
        read.append(box.size)
        return SOURCES[name][box.within(Box.whole(SOURCES[name].shape))]

    rng = random.Random(kind)
    boxes = [Box.whole(found.shape)]
    for _ in range(30):
        ends = [sorted(rng.sample(range(size + 1), 2)) for size in found.shape]
        boxes.append(Box(tuple((first, last) for first, last in ends)))
    for box in boxes:
        read.clear()
        assert torch.equal(found.read(box, fetch), expected[box.within(Box.whole(expected.shape))])
        assert sum(read) == box.size


def test_pieces_of_several_dtypes_lose_nothing() -> None:
    values = {"half": torch.randn(2).bfloat16(), "whole": torch.randn(2)}
    made = Assembly.cat([Assembly.of(name, (2,)) for name in values])
    found = made.read(Box.whole((4,)), lambda name, box: values[name][box.within(Box.whole((2,)))])
    assert torch.equal(found, torch.cat([values["half"].float(), values["whole"]]))


def test_what_has_no_form_is_refused() -> None:
    whole = Assembly.of("a", (6, 4))
    with pytest.raises(TypeError, match=r"torch.flip has no form for slices of files"):
        torch.flip(whole, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differ"):
        torch.stack([whole, whole.transpose(0, 1)])  # type: ignore[list-item]
