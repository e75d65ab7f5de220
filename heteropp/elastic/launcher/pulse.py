"""Agents show by heartbeats that their nodes are alive, and the leader sees whose does not."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection

import torch.distributed as dist

from heteropp.elastic.job import Board
from heteropp.elastic.lease import FOLLOW_S, Lease, LeaseTimer, clock_s
from heteropp.runtime.ranks.heartbeats import POLL_S, MonitoredPeer

LATE_S = 3 * POLL_S  # a node that is silent for so long is not waited for at the job's end


class Heart:
    """Beats in a thread of its own, with a connection of its own: an agent may be busy for long."""

    def __init__(self, board: Board, node: str, lease: Lease, timer: LeaseTimer | None) -> None:
        """Beats for the first time, so that members may be started.

        timer: of this process, where it is to end with the lease as well.
        """
        self.board, self.node = board, node
        self.lease, self.timer = lease, timer
        self._beat(1)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self.thread.start()
        if timer:
            threading.Thread(target=self._end_with_lease, name="lease", daemon=True).start()

    def stop(self) -> None:
        """Waits for the end of a beat, which the store may not answer in time."""
        self.stopped.set()
        self.thread.join()
        if self.timer:
            self.timer.stop()

    def _run(self) -> None:
        try:
            for beat in itertools.count(2):
                if self.stopped.wait(POLL_S):
                    break
                self._beat(beat)
        except dist.DistError:
            pass  # the agent sees it, too

    def _end_with_lease(self) -> None:
        """Says why this process ends, where it can, before the timer ends it without a word."""
        while not self.stopped.wait(FOLLOW_S):
            if self.lease.is_nearly_over():
                why = f"it has not reached the job's store for {self.lease.word_s:.0f} s"
                print(f"node {self.node} stopped: {why}", file=sys.stderr, flush=True)
                os._exit(1)

    def _beat(self, beat: int) -> None:
        sent_s = clock_s()
        self.board.say(beat, *_key(self.node))
        self.lease.renew(sent_s)
        if self.timer:
            self.timer.follow(self.lease)


class Pulse:
    """The leader watches by it which other nodes still answer."""

    def __init__(
        self, board: Board, nodes: Collection[str], silence_s: float, tell: Callable[[str], None]
    ) -> None:
        """silence_s: after which a node is lost. `tell` takes sentences for the user."""
        self.board, self.silence_s, self.tell = board, silence_s, tell
        self.heard = {node: MonitoredPeer() for node in nodes}
        self.next_s = 0.0  # monotonic

    def turn(self) -> list[str]:
        """Returns the nodes that are silent for so long, now and then; it may be called at
        any rate.

        The leases of these nodes have run out (heteropp.elastic.lease).
        """
        now_s = time.monotonic()
        if now_s < self.next_s:
            return []
        self.next_s = now_s + POLL_S
        for node, neighbour in self.heard.items():
            asked_s = time.monotonic()
            beat = self.board.heard(int, *_key(node)) or 0
            if news := neighbour.listen(beat, asked_s, time.monotonic()):
                self.tell(f"node {node} {news}")
        return [node for node in self.heard if self.silent_s(node) > self.silence_s]

    def answering(self) -> list[str]:
        """Returns the nodes that were heard only just now."""
        return [node for node in self.heard if self.silent_s(node) <= LATE_S]

    def silent_s(self, node: str) -> float:
        return self.heard[node].silent_s


def _key(node: str) -> tuple[str, str]:
    return "beat", node
