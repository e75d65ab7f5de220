"""The improved-Metis search (Shong, Liu and Yu, section 3.4): straight to the stages out of memory.

Where the first partition of the layers did not fit, its tightest stage gets more tensor
parallelism, whether or not layers could be moved; otherwise as in Metis.
"""

from __future__ import annotations

from heteropp.search import metis_planner
from heteropp.search.metis_cost import Degrees
from heteropp.search.metis_walk import Tried, by_replicas
from heteropp.search.planner import Request, Result


def search(request: Request) -> Result:
    return metis_planner.search(request, "metis-oom", priority)


def priority(tried: Tried, degrees: Degrees) -> list[float]:
    return tried.first_left or tried.left or by_replicas(degrees)
