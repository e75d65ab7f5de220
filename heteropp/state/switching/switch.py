"""Moves the state of a training from the members of one plan to those of another.

Between the two plans' worlds stands one of all their members, in which the state moves. Members
that leave and members that join both take part in it: the former end, and the latter begin to
train, once it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter

from heteropp.description.plan import Plan
from heteropp.layout.hspmd.exchange import exchange
from heteropp.layout.hspmd.routing import alike
from heteropp.process_groups.control import Control
from heteropp.state.slices.buffers import Buffers, fresh
from heteropp.state.slices.scalars import Scalars
from heteropp.state.switching.pieces import pieces
from heteropp.state.switching.table import Table, table

POSITION = "position"  # announced by the old plan's rank 0
LinkSpeed = Callable[[str, str], float]  # bytes/s from one member to another


@dataclass(frozen=True)
class Position:
    """Where a training stands, besides its tensors."""

    step: int  # completed; with the seed it is also the position in the data
    scalars: Scalars
    ended_s: float  # when its newest step did, by the time of day


@dataclass(frozen=True)
class Switch:
    """Two plans of one model, and who their ranks are."""

    old: Plan
    new: Plan
    old_members: tuple[str, ...]  # names, by rank
    new_members: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """All members' names, by rank of the world in which the state moves.

        Those of the new plan come first, then those that leave.
        """
        leavers = [name for name in self.old_members if name not in self.new_members]
        return (*self.new_members, *leavers)

    def table(self, bytes_per_s: LinkSpeed | None = None) -> Table:
        members = self.members
        places = {name: place for place, name in enumerate(members)}
        speed = (lambda a, b: bytes_per_s(members[a], members[b])) if bytes_per_s else alike
        return table(
            self.old,
            self.new,
            [places[name] for name in self.old_members],
            [places[name] for name in self.new_members],
            speed,
        )


def move(
    switch: Switch,
    table: Table,
    control: Control,
    own: tuple[Position, Buffers] | None,
    device: torch.device,
) -> tuple[Position, Buffers | None]:
    """Moves the state in the world of all members, each of which calls it.

    Returns the training's position and, for a rank of the new plan, its buffers. own: what this
    member has under the old plan, if it is a rank of it; device: where the new buffers will be.
    """
    name = switch.members[control.rank]
    held, wanted, buffers = [], [], None
    if own is not None:
        position, old_buffers = own
        old_rank = switch.old_members.index(name)
        held = pieces(switch.old, old_rank, table, old_buffers)
        if old_rank == 0:
            control.announce(POSITION, _position.dump_json(position).decode())
    if name in switch.new_members:
        rank = switch.new_members.index(name)
        buffers = fresh(switch.new, rank, table.quantities, device)
        wanted = pieces(switch.new, rank, table, buffers)
    exchange(table.rounds, control.rank, held, wanted)
    position = _position.validate_json(control.hear(POSITION))
    control.barrier("moved")  # nobody leaves while another still waits for it
    return position, buffers


_position = TypeAdapter(Position)
