"""Brings the copies of the parameters that another plan than home computes with up to date.

Home is the plan that updates the parameters. What changes places moves in one fused batched
send/recv (Hetu v2, section 6.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heteropp.description.plan import Plan, ministage_layers
from heteropp.description.sections import sections_of
from heteropp.layout.hspmd.exchange import TensorPiece, exchange
from heteropp.optimizer.flat import FlatBuffers
from heteropp.state.slices.quantities import Quantity
from heteropp.state.switching.pieces import pieces
from heteropp.state.switching.table import table


def alike(home: Plan, other: Plan, rank: int) -> bool:
    """Whether a rank, and those it shares a replica with, have the same slices in both plans.

    Then they need no copies, and the gradients are summed where they are wanted.
    """

    def found(plan: Plan) -> tuple[object, ...]:
        p, s, r, tp_index = plan.place(rank)
        stage = plan.pipelines[p].stages[s]
        layers = ministage_layers(plan.pipelines[p], plan.schedule)[s]
        experts = [section.experts for section in sections_of(stage, tp_index, rank)]
        return stage.replicas[r].ranks, layers, stage.sequence_parallel, experts

    return found(home) == found(other)


class Parameters:
    """One rank's part in bringing another plan's copies of the parameters up to date."""

    def __init__(
        self,
        home: Plan,
        other: Plan,
        rank: int,
        ours: Sequence[FlatBuffers],
        theirs: Sequence[FlatBuffers],
    ) -> None:
        self.rank, ranks = rank, range(home.world_size)
        values = Quantity("parameter", home.model.dtype, whole=True)
        found = table(home, other, ranks, ranks, quantities=[values])
        same = {r for r in ranks if alike(home, other, r)}
        self.rounds = [
            tuple(t for t in round_ if t.receiver not in same) for round_ in found.rounds
        ]

        def own(plan: Plan, flats: Sequence[FlatBuffers]) -> list[TensorPiece]:
            buffers = {(k, values.name): flat.values for k, flat in enumerate(flats)}
            return pieces(plan, rank, found, buffers)

        self.held, self.wanted = own(home, ours), own(other, theirs)

    @torch.no_grad()
    def move(self) -> None:
        exchange(self.rounds, self.rank, self.held, self.wanted)
