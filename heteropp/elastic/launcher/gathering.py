"""Agents that torchrun started find each other, in a store that earlier starts used, too."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import torch.distributed as dist

from heteropp.elastic.job import Board
from heteropp.process_groups.seals import TRUE_S
from heteropp.runtime.ranks.agreement import Terms, own_torch, own_version
from heteropp.runtime.ranks.secret import unlike_secrets

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
    own = Present(uuid.uuid4().hex, node, own_version(), own_torch())
    board.say(own, "agent", rank)
    began_s = time.monotonic()
    while time.monotonic() < began_s + timeout_s:
        seen = [board.found(Present, "agent", other) for other in range(world_size)]
        told = [one for one in seen if one]
        if len(told) == world_size and time.monotonic() > began_s + TRUE_S:
            nodes = [agent.node for agent, _ in told]
            if unlike := unlike_secrets(nodes, [is_own for _, is_own in told]):
                raise GatheringError(unlike)
        if rank == 0:
            there = tuple(agent for agent, is_own in told if is_own)
            if len(there) == world_size:
                board.say(Gathered(own.id, there), "gathered")
        found = board.heard(Gathered, "gathered")
        if found and len(found.agents) == world_size and found.agents[rank] == own:
            board.say("", "here", found.id, own.id)
            if all(board.heard(str, "here", found.id, a.id) is not None for a in found.agents):
                return found
        time.sleep(POLL_S)
    raise GatheringError(f"{world_size} agents did not come together in {timeout_s:g} s")
