"""What joins the nodes of a cluster: switches and regions, and the links between them.

A node hangs on its switch, or else on its region, or else on the one fabric of a cluster that
names neither. Within such a place nothing but the NICs limits a message. A link joins two places,
with the same latency and bandwidth in each direction. A switch that no link names is a part of its
region's fabric and limits nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import ConfigDict, Field

Ends = Annotated[tuple[str, ...], Field(min_length=2, max_length=2)]


class FabricError(ValueError):
    """Places or links that cannot be; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class LinkEntry:
    """One [[links]] entry of a cluster file."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    between: Ends  # names of the two switches or regions that it joins
    latency_s: Annotated[float, Field(ge=0, le=1)]  # seconds that it adds to a message's latency
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # bytes per second each way


@dataclass(frozen=True)
class Pipe:
    """One direction of something that messages share; pipes of one name are the same."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True)
class Path:
    """The links from one place to another, in order."""

    latency_s: float = 0.0
    pipes: tuple[Pipe, ...] = ()

    @property
    def bytes_per_s(self) -> float:
        return min((pipe.bytes_per_s for pipe in self.pipes), default=math.inf)


@dataclass(frozen=True)
class Fabric:
    """`free` gives the region of every switch that no link names; `links` are in one order."""

    links: tuple[LinkEntry, ...] = ()
    free: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(
        nodes: Iterable[tuple[str, str]], links: tuple[LinkEntry, ...], bare: Iterable[str] = ()
    ) -> Fabric:
        """Makes the fabric from the (region, switch) of every node; "" stands for none.

        bare: places that links may join although no node is attached to them. Raises FabricError.
        """
        nodes = sorted(set(nodes))
        region_of = _regions_of_switches(nodes)
        regions = {region for region, _ in nodes}
        _check_links(links, sorted(place for place in {*regions, *region_of, *bare} if place))
        linked = {place for link in links for place in link.between}
        free = {switch: region for switch, region in region_of.items() if switch not in linked}
        fabric = Fabric(
            tuple(sorted(links, key=lambda link: sorted(link.between))), tuple(sorted(free.items()))
        )
        fabric._check_connected(sorted({switch or region for region, switch in nodes}))
        return fabric

    def path(self, source: str, destination: str) -> Path:
        """The links between two places that have the least latency together, then the fewest."""
        source, destination = self.root(source), self.root(destination)
        if source == destination:
            return _NOTHING_BETWEEN
        if source not in self._paths:
            self._paths[source] = self._paths_from(source)
        return self._paths[source][destination]

    def root(self, place: str) -> str:
        """Returns the place itself, or the region of a switch that no link joins to anything."""
        return self._regions.get(place, place)

    @cached_property
    def _regions(self) -> dict[str, str]:
        return dict(self.free)

    @cached_property
    def _paths(self) -> dict[str, dict[str, Path]]:
        """A cache of the paths by source and destination, which `path` fills."""
        return {}

    @cached_property
    def _neighbours(self) -> dict[str, list[tuple[str, LinkEntry]]]:
        result: dict[str, list[tuple[str, LinkEntry]]] = {}
        for link in self.links:
            one, other = link.between
            result.setdefault(one, []).append((other, link))
            result.setdefault(other, []).append((one, link))
        return result

    def _paths_from(self, source: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        number = itertools.count()  # of equal paths to a place the first is taken
        ahead = [(0.0, 0, source, next(number), _NOTHING_BETWEEN)]
        while ahead:
            latency_s, length, place, _, path = heapq.heappop(ahead)
            if place in found:
                continue
            found[place] = path
            for next_, link in self._neighbours.get(place, []):
                if next_ in found:
                    continue
                pipe = Pipe(f"link {place} to {next_}", link.bytes_per_s)
                further = Path(latency_s + link.latency_s, (*path.pipes, pipe))
                entry = (further.latency_s, length + 1, next_, next(number), further)
                heapq.heappush(ahead, entry)
        return found

    def _check_connected(self, places: list[str]) -> None:
        roots = [self.root(place) for place in places]
        reached = self._paths_from(roots[0])
        for place, root in zip(places, roots, strict=True):
            if root not in reached:
                raise FabricError(
                    f"nothing links {_words(places[0])} and {_words(place)}, directly or through "
                    "others; a [[links]] entry must join them"
                )


_NOTHING_BETWEEN = Path()


def _words(place: str) -> str:
    return repr(place) if place else "the nodes that name no region"


def _regions_of_switches(nodes: list[tuple[str, str]]) -> dict[str, str]:
    result: dict[str, str] = {}
    regions = {region for region, _ in nodes}
    for region, switch in nodes:
        if not switch:
            continue
        if switch in regions:
            raise FabricError(f"{switch!r} names both a region and a switch")
        if result.setdefault(switch, region) != region:
            raise FabricError(
                f"switch {switch!r} is in two regions, {_words(result[switch])} and "
                f"{_words(region)}; expected one"
            )
    return result


def _check_links(links: tuple[LinkEntry, ...], places: list[str]) -> None:
    known = f"the nodes name {', '.join(places)}" if places else "the nodes name none"
    first: dict[tuple[str, ...], int] = {}
    for index, link in enumerate(links):
        where = f"links[{index}].between"
        for place in link.between:
            if place not in places:
                raise FabricError(
                    f"{where}: no region or switch is called {place!r}; {known}"[:300]
                )
        pair = tuple(sorted(link.between))
        if pair[0] == pair[1]:
            raise FabricError(f"{where} names {pair[0]!r} twice; expected two places")
        if first.setdefault(pair, index) != index:
            raise FabricError(
                f"{where}: links[{first[pair]}] already joins {pair[0]} and {pair[1]}"
            )
