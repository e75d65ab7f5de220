"""Agents that torchrun started find each other, in a store that earlier starts used, too."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import torch.distributed as dist

from heteropp.elastic.job import Board
from heteropp.runtime.ranks.agreement import Terms, own_torch, own_version
from heteropp.runtime.ranks.secret import fingerprint

POLL_S = 0.1


class GatheringError(RuntimeError):
    """Agents that do not come together; the message is one sentence."""


@dataclass(frozen=True)
class Present:
    """An agent of this start, or of an earlier one."""

    id: str
    node: str
    version: Terms
    torch: Terms
    secret: str  # its fingerprint, which tells whether the agents have the same one


@dataclass(frozen=True)
class Gathered:
    """Who rank 0 takes for the agents of its start; `id` is its own."""

    id: str
    agents: tuple[Present, ...]  # by rank


def gather(store: dist.Store, rank: int, world_size: int, node: str, timeout_s: float) -> Gathered:
    """Waits until all agents of this start know of each other; its id is no other start's.

    Each says who it is, rank 0 says whom it sees, and each answers when it sees itself: what an
    earlier start left is overwritten, and never answered. Raises GatheringError.
    """
    board = Board(store)
    own = Present(uuid.uuid4().hex, node, own_version(), own_torch(), fingerprint())
    board.say(own, "agent", rank)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if rank == 0:
            seen = [board.heard(Present, "agent", other) for other in range(world_size)]
            there = tuple(agent for agent in seen if agent)
            if len(there) == world_size:
                board.say(Gathered(own.id, there), "gathered")
        found = board.heard(Gathered, "gathered")
        if found and len(found.agents) == world_size and found.agents[rank] == own:
            board.say("", "here", found.id, own.id)
            if all(board.heard(str, "here", found.id, a.id) is not None for a in found.agents):
                return found
        time.sleep(POLL_S)
    raise GatheringError(f"{world_size} agents did not come together in {timeout_s:g} s")
