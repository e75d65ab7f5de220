"""Where sequences are cut, so that each rank's part takes as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from test_gpt2 import tiny as tiny_gpt2
from training_run import tiny_model

from heteropp import ModelError, token_shares


@pytest.mark.parametrize("attention", ["explicit", "fused"])
@pytest.mark.parametrize(
    ("speeds", "tp", "most"),
    [
        ((1, 1), 1, None),
        ((1, 2), 2, None),
        ((3, 1, 2), 1, None),
        ((1, 1, 1), 4, None),
        ((1, 1, 1), 1, 23),
        ((3, 1, 2), 2, 27),
        ((1, 1), 1, 32),
    ],
)
def test_no_other_cuts_keep_the_slowest_rank_less(
    speeds: tuple[float, ...], tp: int, most: int | None, attention: str
) -> None:
    """Every cut is tried, with FLOPs of each token counted by hand."""
    model = tiny_model(sequence_length=64, attention=attention)
    fixed = replace(model, sequence_length=1, attention="fused").flops_per_token()
    of_key = replace(model, sequence_length=2, attention="explicit").flops_per_token()
    of_key -= replace(model, sequence_length=1, attention="explicit").flops_per_token()

    def slowest(shares: Sequence[int]) -> float:
        times, first = [], 0
        for share, speed in zip(shares, speeds, strict=True):
            tokens = range(first, first + share)
            keys = sum(first + share if attention == "explicit" else t + 1 for t in tokens)
            times.append((share * (fixed - of_key) + keys * of_key) / speed)
            first += share
        return max(times)

    every = product(range(tp, 64, tp), repeat=len(speeds))
    allowed = (s for s in every if sum(s) == 64 and max(s) <= (most or 64))
    least = min(map(slowest, allowed))
    found = token_shares(model, speeds, tp, most)
    assert max(found) <= (most or 64)
    assert sum(found) == 64 and not any(share % tp for share in found)
    assert slowest(found) == pytest.approx(least, rel=1e-12)


def test_what_cannot_be_shared_is_one_sentence() -> None:
    model = tiny_model()
    for speeds, tp in (((1, 1, 1), 8), ((1, 0), 1), ((1, 1), 3)):
        with pytest.raises(ModelError, match="a sequence of 16 tokens cannot be cut into"):
            token_shares(model, speeds, tp)
    with pytest.raises(ModelError, match="16 tokens has no 2 parts of at most 7"):
        token_shares(model, (1, 1), most=7)
    for few in ((), (1,)):
        with pytest.raises(ModelError, match=f"speeds has {len(few)} ranks; expected at least two"):
            token_shares(model, few)
    with pytest.raises(ModelError, match="sequences of family gpt2 cannot be cut over ranks"):
        token_shares(tiny_gpt2(), (1, 1))
