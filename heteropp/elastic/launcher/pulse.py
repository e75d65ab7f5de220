"""Agents show by heartbeats that their nodes are alive, and the leader sees whose does not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection

import torch.distributed as dist

from heteropp.elastic.job import Board
from heteropp.runtime.ranks.heartbeats import POLL_S, MonitoredPeer

LATE_S = 3 * POLL_S  # after which a silent node is the likely cause of an end


class Heart:
    """Beats in a thread of its own, with a connection of its own: an agent may be busy for long."""

    def __init__(self, board: Board, node: str) -> None:
        self.board, self.node = board, node
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Waits for the end of a beat, which the store may not answer in time."""
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            for beat in itertools.count(1):
                if self.stopped.wait(POLL_S):
                    break
                self.board.say(beat, *_key(self.node))
        except dist.DistError:
            pass  # the agent sees it, too


class Pulse:
    """The leader watches by it which other nodes still answer."""

    def __init__(
        self, board: Board, nodes: Collection[str], deadline_s: float, tell: Callable[[str], None]
    ) -> None:
        """`tell` takes sentences for the user."""
        self.board, self.deadline_s, self.tell = board, deadline_s, tell
        self.heard = {node: MonitoredPeer() for node in nodes}
        self.lost: set[str] = set()
        self.next_s = 0.0  # monotonic

    def turn(self) -> list[str]:
        """Returns the nodes newly found silent past the deadline; it may be called at any rate."""
        now_s = time.monotonic()
        if now_s < self.next_s:
            return []
        self.next_s = now_s + POLL_S
        for node, neighbour in self.heard.items():
            if news := neighbour.listen(self.board.heard(int, *_key(node)) or 0, now_s):
                self.tell(f"node {node} {news}")
        return self._lose(self.deadline_s)

    def lose_late(self) -> list[str]:
        """Returns the nodes newly found silent when others end, with a shorter limit: they may be
        the cause of that end.
        """
        lost = self._lose(LATE_S)
        for node in lost:
            if not self.heard[node].missed:
                self.tell(f"node {node} has not answered for {self.silent_s(node):.0f} s")
        return lost

    def silent_s(self, node: str) -> float:
        return self.heard[node].silent_s

    def _lose(self, past_s: float) -> list[str]:
        silent = [node for node in self.heard if self.silent_s(node) > past_s]
        news = [node for node in silent if node not in self.lost]
        self.lost.update(news)
        return news


def _key(node: str) -> tuple[str, str]:
    return "beat", node
