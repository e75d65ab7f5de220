"""Dropout's masks: as random as they need be, and the same for every layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from training_run import tiny_model

from heteropp.models.llama.dropout import Dropout, row_and_column_hashes
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.spec import ModelError
from heteropp.models.stage_module import StageModule

ROWS, COLUMNS, PROBABILITY = 400, 300, 0.25


def mask(
    seed: int = 0, place: str = "layers.3.mlp", first_row: int = 0, rows: int = ROWS
) -> Tensor:
    """True where an element is dropped."""
    ones = torch.ones(rows, COLUMNS)
    hashes = row_and_column_hashes(torch.arange(first_row, first_row + rows), COLUMNS)
    result = Dropout(PROBABILITY, seed, place)(ones, hashes)
    assert set(result.unique().tolist()) == {0, torch.tensor(1 / (1 - PROBABILITY)).item()}
    return result == 0


@pytest.mark.parametrize("first_row", [0, 2**31 - 100, 10**12])
def test_every_row_and_column_drops_its_share(first_row: int) -> None:
    dropped = mask(first_row=first_row).double()
    for along, count in ((0, ROWS), (1, COLUMNS)):
        deviation = math.sqrt(PROBABILITY * (1 - PROBABILITY) / count)
        shares = dropped.mean(along)
        assert (shares - PROBABILITY).abs().max() < 5 * deviation
        assert 0.8 < shares.std() / deviation < 1.2  # no more even than chance either


def test_masks_have_nothing_to_do_with_each_other() -> None:
    """Two masks coincide as often as independent ones.

    Compared are masks of another seed, place or step, a mask shifted by a row or a column, and a
    mask transposed.
    """
    dropped = mask()
    square = dropped[:COLUMNS]
    others = [
        mask(seed=1),
        mask(place="layers.3.attention"),
        mask(place="layers.4.mlp"),
        mask(first_row=ROWS),
        mask(first_row=1),
        mask(first_row=2**31),
        dropped.roll(1, 1),
    ]
    pairs = [(dropped, other) for other in others] + [(square, square.t())]
    for one, other in pairs:
        both = (one & other).double().mean()
        count = one.numel() / 2  # of a mask and its transpose, half are pairs of their own
        assert (both - PROBABILITY**2).abs() < 5 * math.sqrt(PROBABILITY**2 / count)


def test_rows_are_dropped_alike_whoever_computes_them() -> None:
    whole = mask(first_row=1000)
    assert torch.equal(whole[123:200], mask(first_row=1123, rows=77))


def test_a_model_drops_in_training_alone() -> None:
    model = tiny_model(dropout=0.2)
    tokens = torch.arange(2 * model.sequence_length)

    def module(model: object) -> StageModule:
        found = model.build((0, 2), SoloGroup(), "cpu", torch.float32)  # type: ignore[arg-type]
        found.initialise(0)
        return found

    dropping, plain = module(model), module(replace(model, dropout=0.0))
    assert not torch.equal(dropping(tokens), plain(tokens))
    assert not torch.equal(dropping(tokens), dropping(tokens, first_row=len(tokens)))
    assert torch.equal(dropping.eval()(tokens), plain(tokens))


def test_a_probability_that_cannot_be_is_refused() -> None:
    for dropout in (-0.1, 1.0, math.nan):
        with pytest.raises(ModelError, match="expected at least 0 and below 1"):
            tiny_model(dropout=dropout).validate()
