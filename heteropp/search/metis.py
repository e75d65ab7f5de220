"""Metis's search (Um et al., USENIX ATC 2024), under its cost as metis_cost.py has it.

The stage whose memory has least room gets more tensor parallelism, by the room that the last
partition of the layers left; where none fitted, the stage with most replicas.
"""

from __future__ import annotations

from heteropp.search import metis_planner
from heteropp.search.metis_cost import Degrees
from heteropp.search.metis_walk import Tried, by_replicas
from heteropp.search.planner import Request, Result


def search(request: Request) -> Result:
    return metis_planner.search(request, "metis", priority)


def priority(tried: Tried, degrees: Degrees) -> list[float]:
    return tried.left or by_replicas(degrees)
