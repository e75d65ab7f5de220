"""A profile computes with values as unlike as training does: a GPU is slower with them."""

from __future__ import annotations

import pytest
import torch
from clusters import tiny_model

from heteropp.description.profile import Block
from heteropp.profiling.blocks import ProfiledBlock
from heteropp.runtime.measuring.metrics import HostClock
from heteropp.runtime.ranks.device import Device


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
def test_rows_are_unlike(first: bool, last: bool) -> None:
    block = Block(chip="x", tp=1, sequences=4, layers=1, first=first, last=last)
    device = Device(torch.device("cpu"), "gloo", HostClock())
    profiled = ProfiledBlock(tiny_model(), block, device)
    given = [profiled.input(), profiled.tokens]
    if (gradient := profiled.gradient()) is not None:
        given.append(gradient)
    for values in given:
        rows = values.view(profiled.rows, -1)
        assert len(rows.unique(dim=0)) > profiled.rows // 4
