"""Bytes that ranks send to each other, as dicomm counts them, and the links that they go over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from heteropp.description.cluster import Cluster


class SentBytes:
    """What this rank sends in groups whose backend is dicomm."""

    def __init__(self, groups: Iterable[dist.ProcessGroup]) -> None:
        self.groups = list(dict.fromkeys(groups))
        self.before: dict[int, int] = {}

    def begin(self) -> None:
        """Counts from here on."""
        self.before = self._total()

    def new(self) -> tuple[tuple[int, int], ...]:
        """Returns (peer, bytes), for each peer to which something was sent since `begin`."""
        since = ((peer, size - self.before.get(peer, 0)) for peer, size in self._total().items())
        return tuple((peer, size) for peer, size in since if size)

    def _total(self) -> dict[int, int]:
        import dicomm.distributed  # only where chips are

        total: dict[int, int] = defaultdict(int)
        for group in self.groups:
            for peer, size in dicomm.distributed.bytes_sent(group).items():
                total[peer] += size
        return total


def by_link(cluster: Cluster | None, sent: Sequence[Sequence[tuple[int, int]]]) -> dict[str, int]:
    """Adds up what ranks sent by the nodes of sender and receiver.

    sent: by rank, (peer, bytes). Empty without a cluster.
    """
    if cluster is None:
        return {}
    names = cluster.node_names
    total: dict[str, int] = defaultdict(int)
    for rank, peers in enumerate(sent):
        own = cluster.node_index(rank)
        for peer, size in peers:
            other = cluster.node_index(peer)
            inside = own == other
            total[f"inside {names[own]}" if inside else f"{names[own]} to {names[other]}"] += size
    return dict(sorted(total.items()))
