"""The seconds of replicas' work: once for those that are alike, and for those of other plans too
unless experts lie over the ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from heteropp.cost.planned import GroupLinks, StageWork, ministage_times, stage_shape, stage_works
from heteropp.cost.stage_time import Time
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.simulator.placement import Seat
from heteropp.simulator.together import joined, slowest
from hyperhetero.remembered import Remembered

Times = list[list[Time]]  # by ministage and slice

_known: Remembered[Times] = Remembered(1024)  # most plans of a search differ in a stage or two


class SeatTimes:
    """The times of a plan's replicas."""

    def __init__(
        self, plan: Plan, cluster: Cluster, links: Mapping[int, GroupLinks], emulated: bool
    ) -> None:
        """links: by rank. emulated: see heteropp.simulator.program.compile_plan."""
        self.plan, self.cluster, self.links, self.emulated = plan, cluster, links, emulated
        self._works = [stage_works(plan, pipeline) for pipeline in plan.pipelines]
        self._found: dict[Hashable, Times] = {}

    def of(self, seat: Seat) -> Times:
        """Returns the times of each ministage, by slice; where a seat's ranks differ, the slowest
        counts.
        """
        stage, place = self._work(seat).stage, (seat.pipeline, seat.stage)
        if stage.ep > 1:
            if place not in self._found:
                self._found[place] = list(self._with_experts(seat))
            return self._found[place]
        kind = stage.replicas[seat.replica].kind
        parts = frozenset((i // stage.tp, self.links[rank]) for i, rank in enumerate(seat.ranks))
        alike = place, kind, parts
        if alike not in self._found:
            key = self._work(seat), kind, parts, self.emulated, self.cluster
            self._found[alike] = _known.get(key, lambda: list(self._in_parts(seat, parts)))
        return self._found[alike]

    def _work(self, seat: Seat) -> StageWork:
        return self._works[seat.pipeline][seat.stage]

    def _in_parts(
        self, seat: Seat, parts: frozenset[tuple[int, GroupLinks]]
    ) -> Iterator[list[Time]]:
        """Yields the times of a seat's ministages.

        parts: the context-parallel index of each of its ranks, with the links that the rank has.
        The exchange in each layer joins context-parallel ranks, so that of them the slowest counts.
        """
        work = self._work(seat)
        firsts = seat.ranks[:: work.stage.tp]  # of each part
        of_parts = [self._ministages(work, firsts[part], links) for part, links in parts]
        for by_part in zip(*of_parts, strict=True):
            yield [slowest(times) for times in zip(*by_part, strict=True)]

    def _with_experts(self, seat: Seat) -> Iterator[list[Time]]:
        """Yields the times of a seat's ministages where experts lie over the stage's ranks.

        Rows go to experts and come back in every layer: the slowest rank's attention and the
        slowest rank's experts count, one after the other, for all.
        """
        work = self._work(seat)
        ranks = {
            (stage_shape(self.plan, rank), self.links[rank], self.plan.chip(rank)): rank
            for rank in (group[0] for group in work.stage.groups)
        }.values()  # one of those that are alike
        once, twice = (
            [self._ministages(work, rank, self.links[rank], more) for rank in ranks]
            for more in (False, True)
        )
        for k, (first, last) in enumerate(work.held):
            times, with_twice_the_rows = (
                [time for ministages in by_rank for time in ministages[k]]
                for by_rank in (once, twice)
            )
            yield [joined(times, with_twice_the_rows, last - first)]

    def _ministages(
        self, work: StageWork, rank: int, links: GroupLinks, twice_the_rows: bool = False
    ) -> list[tuple[Time, ...]]:
        """Returns the times of a stage's ministages on a rank's chip, for its part of sequences."""
        of = self.plan, self.cluster, rank, work.held, links, self.emulated, twice_the_rows
        return ministage_times(*of)
