"""Traces of stages whose experts lie over ranks do not depend on what was asked for before."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_decoders import tiny_config

from heteropp.cost.tracing import cache
from heteropp.cost.tracing.kind import Spread, StageKind
from heteropp.cost.tracing.stage import record_stage
from heteropp.cost.tracing.traces import at, outline, trace_stage
from heteropp.models.hugging_face.reading import read


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_each_number_of_sequences_has_its_own(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thirds of the tokens are this rank's: two sequences, not three, make whole numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = tiny_config("mixtral", layers=1, intermediate_size=256).to_dict()
    model = read(values, f"in order {order}", sequence_length=24, dtype="float32")

    def kind(sequences: int) -> StageKind:
        spread = Spread((2, 2), (2, 1))
        ends = dict(first=False, last=False, tp=1)
        return StageKind(
            model.block_kind(0), **ends, sequences=sequences, token_shares=(16, 8), spread=spread
        )

    found = {n: trace_stage(model, kind(n), 1).kept_bytes for n in order}
    for sequences, kept_bytes in found.items():
        alone = outline([record_stage(model, 1, kind(sequences))])
        assert kept_bytes == at(alone, 1).kept_bytes
    cache.flush()


def test_ranks_to_which_the_others_are_alike_are_the_same() -> None:
    shares, rows = (4, 2, 4, 2), (30, 10, 30, 20)
    found = [Spread.of(shares, rows, index) for index in range(4)]
    assert found[0] == found[2] == Spread((4, 2, 2, 4), (3, 1, 2, 3))
    assert found[1] == Spread((2, 2, 4, 4), (1, 2, 3, 3))
    assert found[3] == Spread((2, 2, 4, 4), (2, 1, 3, 3))


@pytest.mark.parametrize("rows", [(1, 1, 1), (2, 1, 1)])
def test_the_order_of_the_other_ranks_changes_no_trace(rows: tuple[int, ...]) -> None:
    """The third of three ranks, traced where it stands, and as the first of them."""
    values = tiny_config("mixtral", layers=1, intermediate_size=256).to_dict()
    model = read(values, f"in order {rows}", sequence_length=24, dtype="float32")
    kinds = [
        StageKind(model.block_kind(0), first=False, last=True, tp=1, sequences=2, spread=spread)
        for spread in (Spread((1, 2, 1), rows), Spread((1, 1, 2), (rows[0], rows[2], rows[1])))
    ]
    one, other = (record_stage(model, 2, kind) for kind in kinds)
    assert one == other
