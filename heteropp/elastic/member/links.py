"""The links between members, whatever generation they are of: over emulated ones state moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from heteropp.description.cluster import read_cluster


class ClusterLinks:
    """The links between all chips that the job may ever have, of whichever generation."""

    def __init__(self, cluster: Path) -> None:
        self.cluster = read_cluster(cluster)

    def bytes_per_s(self, source: str, destination: str) -> float:
        ranks = self.cluster.rank(source), self.cluster.rank(destination)
        return self.cluster.link(*ranks).bytes_per_s

    def pace(self, members: Sequence[str]) -> None:
        """Paces this rank's links to the other ranks, in a world of these members."""
        import dicomm.distributed  # only where chips are

        own = dist.get_rank()
        here = self.cluster.rank(members[own])
        links = {
            peer: self.cluster.link(here, self.cluster.rank(member))
            for peer, member in enumerate(members)
            if peer != own
        }
        dicomm.distributed.set_links(
            None, {peer: (link.latency_s, link.bytes_per_s) for peer, link in links.items()}
        )
