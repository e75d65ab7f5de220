"""The ranks of a machine have one of them, the node's leader, speak to the job's store for all.

So what watching asks of the store grows with the machines and not with the ranks. The lowest rank
whose watch goes on is the leader. Once a second it beats for its node and listens to the node
before, in a ring; and it calls the ranks of its machine, over local sockets, with the news. They
answer with beats of their own. When its watch has finished, the next rank becomes the leader.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from heteropp.process_groups.seals import Found, Seals
from heteropp.runtime.ranks.first_cause import Cause, FirstCause
from heteropp.runtime.ranks.heartbeats import POLL_S, MonitoredPeer
from heteropp.runtime.ranks.processes import process_of
from heteropp.runtime.ranks.store import limit_answers
from heteropp.runtime.ranks.surroundings import Surroundings

TELL_S = 3 * POLL_S  # for the others to hear the cause
MESSAGE_BYTES = 1 << 20
# The leader of a node that waits for the store is silent for as long as the store may be, and then
# says so: it is to be heard before it is taken for silent itself.
LEADER_S = 2 * POLL_S
# The others of a silent leader's node notice its silence so much later than the next node does.
TELL_SILENCE_S = LEADER_S + 2 * POLL_S


@dataclass(frozen=True)
class News:
    """What the watch of a rank hears."""

    cause: Cause | None = None  # of the job's end
    stop: bool = False  # some rank was told to
    beats: list[int] | None = None  # of all ranks, if this one has asked
    store_is: str | None = None  # "silent" or "dead"
    silent: int | None = None  # a rank, for longer than the deadline


class NodeBeat(NamedTuple):
    """What a node's leader writes to the store once a second."""

    beat: int
    leader: int
    beats: dict[str, int]  # of the node's ranks


class Channel:
    """Messages to and from another process of this machine; one that it cannot take is dropped."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.is_closed = connection, False
        connection.setblocking(False)

    def send(self, **words: Any) -> None:
        with suppress(OSError):
            self.socket.send(json.dumps(words).encode())

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yields what has come by now."""
        try:
            while message := self.socket.recv(MESSAGE_BYTES):
                yield json.loads(message)
            self.is_closed = True
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # or what no rank says
            self.is_closed = True

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a forked process may have the socket, too
        self.socket.close()


class LocalRank:
    """A rank of the leader's machine that has called it."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.beat, self.asks = channel, 0, False


Listen = Callable[[MonitoredPeer, int, int, float], bool]
"""Takes a rank's beat, and returns whether it is silent for longer than a limit in seconds."""


class NodeLeader:
    """The post of the rank that speaks to the store."""

    def __init__(
        self,
        seals: Seals,
        surroundings: Surroundings,
        presence: socket.socket,
        deadline_s: float,
        listen: Listen,
        beats: int,
    ) -> None:
        """presence: where the machine's other ranks call; beats: of this rank, so far."""
        self.seals, self.first_cause = seals, FirstCause(seals)
        self.rank, self.world_size = surroundings.rank, len(surroundings.labels)
        self.surroundings, self.node = surroundings, surroundings.node
        self.numbers = {process.number: rank for rank, process in surroundings.local.items()}
        self.presence, self.deadline_s, self.listen = presence, deadline_s, listen
        self.beats = beats
        self.node_beat: int | None = None  # not known yet
        self.asks = False  # this rank, for everyone's beats
        self.calls: dict[Channel, int] = {}  # that have not said a word yet, as one that only looks
        self.locals: dict[int, LocalRank] = {}  # by rank
        # from now on, as one that is paused does not even call
        self.peers = {rank: MonitoredPeer() for rank in surroundings.local if rank != self.rank}
        self.neighbour = MonitoredPeer()  # the node before
        self.neighbours_leader: int | None = None

    def ask(self) -> None:
        """Makes this rank hear everyone's beats."""
        self.asks = True

    def sockets(self) -> list[socket.socket]:
        channels = [*self.calls, *(local.channel for local in self.locals.values())]
        return [self.presence, *(channel.socket for channel in channels)]

    def heard(self) -> Iterator[News]:
        """Takes what the machine's other ranks have said by now."""
        self._take_calls()
        for rank, local in list(self.locals.items()):
            for words in local.channel.heard():
                local.beat, local.asks = words["beat"], words["asks"]
                if words["cause"]:
                    yield News(cause=words["cause"])
            if local.channel.is_closed:  # it has finished; its death is seen elsewhere
                self.locals.pop(rank).channel.close()

    def turn(self) -> News:
        """Once a second: asks the store, and tells the others. Raises the store's RuntimeError."""
        cause = self.first_cause.heard()
        if cause:
            return News(cause=cause)
        stop = self.seals.get("stop") is not None
        self.beat()
        silent = self._silent_rank()
        asked = self.asks or any(local.asks for local in self.locals.values())
        beats = self._beats_of_all() if asked else None
        for local in self.locals.values():
            self._tell(local, News(stop=stop, beats=beats if local.asks else None))
        return News(stop=stop, beats=beats, silent=silent)

    def beat(self) -> None:
        """Shows that this node is alive. Raises RuntimeError."""
        if self.node_beat is None:  # another leader of this node may have beaten before
            self.node_beat = max(_node_beat(self.seals.find(_key(self.node))).beat, 0)
        self.beats += 1
        self.node_beat += 1
        beats = {str(rank): local.beat for rank, local in self.locals.items()}
        words = NodeBeat(self.node_beat, self.rank, {**beats, str(self.rank): self.beats})
        self.seals.set(_key(self.node), json.dumps(words))

    def pass_on(self, news: News) -> None:
        """Tells the machine's other ranks and, of a cause, the other nodes. Raises RuntimeError."""
        for local in self.locals.values():
            self._tell(local, news)
        if news.cause:
            self.seals.set(_told(self.node), "")

    def await_others(self, cause: Cause) -> None:
        """Waits for a moment until all nodes have heard the cause, but that of a dead leader."""
        limit_s = _hearing_s(cause)
        without = {self.node} if cause.get("silent") else {self.node, cause["rank"]}
        others = [_told(node) for node in self.surroundings.nodes if node not in without]
        if others:
            with suppress(RuntimeError):
                self.seals.store.set_timeout(timedelta(seconds=limit_s))
                limit_answers(self.seals.store, limit_s + POLL_S)
                self.seals.wait(others)

    def close(self) -> None:
        for channel in [*self.calls, *(local.channel for local in self.locals.values())]:
            channel.close()

    def _take_calls(self) -> None:
        with suppress(OSError):  # nobody else calls, or this process has no descriptor left
            while True:
                connection, _ = self.presence.accept()
                channel = Channel(connection)
                self.calls[channel] = self.numbers.get(process_of(connection), -1)
        for channel, rank in list(self.calls.items()):
            # a stranger's word is not even read
            words = next(channel.heard(), None) if rank >= 0 else None
            if words:
                self.locals[rank] = LocalRank(channel)
            if words or channel.is_closed or rank < 0:
                del self.calls[channel]
            if channel.is_closed or rank < 0:
                channel.close()

    def _tell(self, local: LocalRank, news: News) -> None:
        local.channel.send(**asdict(news))

    def _silent_rank(self) -> int | None:
        for rank, peer in list(self.peers.items()):
            local = self.locals.get(rank)
            if local is None and has_finished(self.seals, rank):
                del self.peers[rank]
            elif self.listen(peer, rank, local.beat if local else -1, self.deadline_s):
                return rank
        return self._silent_neighbour()

    def _silent_neighbour(self) -> int | None:
        before = self.surroundings.nodes[self.surroundings.nodes.index(self.node) - 1]
        if before == self.node:
            return None
        found = _node_beat(self.seals.find(_key(before)))
        if self.neighbours_leader is None:
            self.neighbours_leader = before
        if found.beat > self.neighbour.beat:
            self.neighbours_leader = found.leader
        else:  # it may have finished, and its follower be silent
            ranks = {self.neighbours_leader, *map(int, found.beats)}
            for rank in sorted(ranks - set(range(self.neighbours_leader))):
                self.neighbours_leader = rank
                if not has_finished(self.seals, rank):
                    break
            else:
                return None
        is_silent = self.listen(self.neighbour, self.neighbours_leader, found.beat, self.deadline_s)
        return self.neighbours_leader if is_silent else None

    def _beats_of_all(self) -> list[int]:
        found = map(_node_beat, self.seals.read([_key(node) for node in self.surroundings.nodes]))
        beats = {int(rank): beat for node in found for rank, beat in node.beats.items()}
        return [beats.get(rank, 0) for rank in range(self.world_size)]


class NodeRank:
    """The post of a rank that the leader of its node speaks for."""

    def __init__(
        self,
        connection: socket.socket,
        leader: int,
        deadline_s: float,
        beats: int,
    ) -> None:
        self.channel, self.leader, self.beats = Channel(connection), leader, beats
        self.limit_s = deadline_s + LEADER_S
        self.peer, self.calls = MonitoredPeer(), 0
        self.asks = False
        self._answer()

    def ask(self) -> None:
        """Makes this rank hear everyone's beats."""
        if not self.asks:
            self.asks = True
            self._answer()

    def sockets(self) -> list[socket.socket]:
        return [self.channel.socket]

    def heard(self) -> Iterator[News]:
        """Takes what the leader has said by now, and answers."""
        for words in self.channel.heard():
            self.calls += 1
            self.beats += 1
            self._answer()
            yield News(**words)

    def turn(self) -> News:
        # no word of it before the limit: a leader that waits for the store is silent and healthy
        self.peer.listen(self.calls, time.monotonic())
        return News(silent=self.leader if self.peer.silent_s > self.limit_s else None)

    def pass_on(self, news: News) -> None:
        """Tells the leader of a cause."""
        self._answer(news.cause)

    def await_others(self, cause: Cause) -> None:
        """Waits for a moment for the leader's end, which waits for that of the others."""
        until_s = time.monotonic() + _hearing_s(cause)
        while not self.channel.is_closed and (left_s := until_s - time.monotonic()) > 0:
            select.select([self.channel.socket], [], [], left_s)
            list(self.channel.heard())

    def close(self) -> None:
        self.channel.close()

    def _answer(self, cause: Cause | None = None) -> None:
        self.channel.send(beat=self.beats, asks=self.asks, cause=cause)


def finish(seals: Seals, surroundings: Surroundings) -> None:
    """Says that a rank has finished; nobody has to wait for its node once all of its ranks have.

    Raises RuntimeError.
    """
    seals.set(_finished(surroundings.rank), "")
    if all(has_finished(seals, rank) for rank in surroundings.local if rank != surroundings.rank):
        seals.set(_told(surroundings.node), "")


def has_finished(seals: Seals, rank: int) -> bool:
    return seals.get(_finished(rank)) is not None


def _finished(rank: int) -> str:
    return f"finished/{rank}"


def _hearing_s(cause: Cause) -> float:
    """Returns how long the others may take to hear a cause."""
    return TELL_SILENCE_S if cause.get("silent") else TELL_S


def _key(node: int) -> str:
    return f"beat/{node}"


def _told(node: int) -> str:
    return f"told/{node}"


def _node_beat(found: Found | None) -> NodeBeat:
    if found is None or not found.is_true:
        return NodeBeat(-1, -1, {})
    return NodeBeat(*json.loads(found.text))
