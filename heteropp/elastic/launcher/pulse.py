"""Agents show by heartbeats that their nodes are alive, and the leader sees whose does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import torch.distributed as dist

from heteropp.elastic.job import Board
from heteropp.training.ranks.heartbeats import POLL_S, Neighbour

LATE_S = 3 * POLL_S  # after which a silent node is the likely cause of an end


class Heart:
    """Beats in a thread of its own, with a connection of its own: an agent may be busy for long."""

    def __init__(self, board: Board, node: str) -> None:
        self.board, self.node = board, node
        self.stopped = threading.Event()
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()

    def _run(self) -> None:
        try:
            while not self.stopped.wait(POLL_S):
                self.board.store.add(_key(self.node), 1)
        except dist.DistError:
            pass  # the agent sees it, too


class Pulse:
    """The leader watches by it which other nodes still answer."""

    def __init__(
        self,
        board: Board,
        nodes: Collection[str],
        deadline_s: float,
        tell: Callable[[str], None],
        lose: Callable[[str], None],
    ) -> None:
        """`tell` takes sentences, `lose` a node that was silent past the deadline."""
        self.store, self.deadline_s, self.tell, self.lose = board.store, deadline_s, tell, lose
        self.heard = {node: Neighbour() for node in nodes}
        self.lost: set[str] = set()
        self.next_s = 0.0  # monotonic

    def turn(self) -> None:
        """Is called more often than it has something to do."""
        now_s = time.monotonic()
        if now_s < self.next_s:
            return
        self.next_s = now_s + POLL_S
        for node, neighbour in self.heard.items():
            if news := neighbour.listen(self.store.add(_key(node), 0), now_s):
                self.tell(f"node {node} {news}")
            if neighbour.silent_s > self.deadline_s and node not in self.lost:
                self.lost.add(node)
                self.lose(node)

    def name_silent(self) -> set[str]:
        """Which nodes are, at an end that they may be the cause of; tells of new ones."""
        silent = {node for node, heard in self.heard.items() if heard.silent_s > LATE_S}
        for node in sorted(silent):
            if not self.heard[node].missed:
                self.tell(f"node {node} has not answered for {self.heard[node].silent_s:.0f} s")
        return silent


def _key(node: str) -> str:
    return f"beat/{node}"
