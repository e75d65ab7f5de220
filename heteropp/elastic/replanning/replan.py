"""The next plan: the best one on the chips that there are, found from the plan before.

What is left of the old plan, with its numbers dealt out anew, is the first to beat. Then come the
planners, and skeletons of all the chips; last clusters with chips left out, such as those that
leave whole nodes or one chip type. What cannot beat the best so far is skipped; of plans about as
fast, the one is taken that moves least. Sequences are cut over chips where the old plan cuts them,
and experts lie over them where the old plan's do, or where nothing fits otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from heteropp.cost.capacity import check_memory
from heteropp.cost.planned import human_bytes
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, PlanError, Schedule, validate
from heteropp.description.profile import ProfileError
from heteropp.elastic.replanning.adapted import adapted
from heteropp.elastic.replanning.in_parts import in_parts, of_shorter
from heteropp.elastic.replanning.moved import moved_bytes
from heteropp.elastic.replanning.spread import spread, stated_capacity
from heteropp.models.spec import ModelError
from heteropp.search.auto.changed import with_each
from heteropp.search.auto.freedom import USUAL_PARTS, Freedom
from heteropp.search.auto.slicing import sliced
from heteropp.search.balance import Balance, Sketch
from heteropp.search.judge import Judged, ask, judge, relaxed
from heteropp.search.parts import BY_WORK, EVEN
from heteropp.search.planner import (
    Candidate,
    DoesNotFitError,
    Request,
    Result,
    SearchError,
)
from heteropp.search.skeletons import Skeleton, skeletons

NEAR = 1.02  # plans that take so many times as long as the best are about as fast
COMPARED = 8  # of those, at most
SIMULATED = 96  # ranks of plans on skeletons of a cluster, in all
# once some plan is found to fit, so many others on a cluster's skeletons are tried
PARTED = 2  # that cut sequences, for each number of parts
SPREAD, FAILED = 4, 24  # whose experts are spread: once one fits, and where none does
RELAXED = 3  # of the best plans
SMALL = 32  # chips, up to which stages may have degrees of their own, and AutoHet is asked


@dataclass(frozen=True)
class Replanned:
    """A plan, and the cluster of the chips that it uses: mostly all that there are."""

    cluster: Cluster
    plan: Plan
    step_s: float  # simulated
    search_s: float
    note: str  # where it comes from, and what it moves


@dataclass(frozen=True)
class _Candidate:
    cluster: Cluster
    judged: Judged
    moved_bytes: int = 0

    @property
    def step_s(self) -> float:
        return self.judged.simulation.step_s


def replan(
    cluster: Cluster,
    old: Plan,
    old_members: Sequence[str],
    nodes: Collection[str] = (),
    documents_apart: bool = False,
    expert_capacity: float | None = None,
) -> Replanned:
    """The best plan on a cluster for the model and global batch of an old plan.

    old_members: the names of the old plan's chips, by its ranks; nodes: the plan is to use chips of
    each of them, even if another would be faster; documents_apart: memory is to have room for
    attention within documents; expert_capacity: of stages whose experts the plan spreads; None:
    as the old one says. The schedule and ZeRO stage are the old ones where a plan with them fits,
    else 1F1B, or Zorse's. Raises SearchError, one sentence, where no plan fits.
    """
    began_s = time.perf_counter()
    errors: list[SearchError] = []
    for schedule in dict.fromkeys((old.schedule, "1f1b")):
        search = _ReplanSearch(
            cluster, old, old_members, schedule, nodes, documents_apart, expert_capacity
        )
        search.run()
        if search.found:
            break
        errors += search.errors
    else:
        search.ask("zorse", cluster)
        search.rescue()
        if not search.found:
            raise _no_plan(cluster, errors)
    search.relax()
    chosen = search.chosen()
    return Replanned(
        cluster=chosen.cluster,
        plan=chosen.judged.plan,
        step_s=chosen.step_s,
        search_s=time.perf_counter() - began_s,
        note=f"by {_planner(chosen.judged.plan)}; {human_bytes(chosen.moved_bytes)} of state move",
    )


def _no_plan(cluster: Cluster, errors: list[SearchError]) -> SearchError:
    counts = (f"{len(cluster.ranks_of(name))} of {name}" for name in cluster.chip_names())
    unmeasured = SearchError("the profile knows nothing of such stages")
    why = next((e for e in errors if isinstance(e, DoesNotFitError)), [*errors, unmeasured][0])
    return SearchError(f"no plan for the chips that are left ({', '.join(counts)}): {why}")


class _ReplanSearch:
    def __init__(
        self,
        cluster: Cluster,
        old: Plan,
        old_members: Sequence[str],
        schedule: Schedule,
        nodes: Collection[str],
        documents_apart: bool,
        expert_capacity: float | None,
    ) -> None:
        self.cluster, self.old, self.old_members = cluster, old, old_members
        self.documents_apart = documents_apart
        self.expert_capacity = expert_capacity or stated_capacity(old)
        self.like, self.nodes = replace(old, schedule=schedule), nodes
        self.spreads = old.has_expert_parallelism
        self.found: list[_Candidate] = []
        self.errors: list[SearchError] = []
        self.bound_s = 0.0

    @property
    def best_s(self) -> float:
        return min((found.step_s for found in self.found), default=math.inf)

    def run(self) -> None:
        balance = Balance(self.cluster, self.like)
        self.bound_s = self._least_s(balance)
        present = {member: rank for rank, member in enumerate(self.cluster.members)}
        left = adapted(self.like, [present.get(m) for m in self.old_members], self.cluster)
        self._try("the old plan", balance, [left])
        if self.like.has_context_parallelism:
            self._try_parts(self.cluster, [left])
            self._try_parts(self.cluster)
        self._everything(balance)
        for smaller in filter(self._may_do, _smaller(self.cluster)):
            balance = Balance(smaller, self.like)
            if self._least_s(balance) < self.best_s:
                self._everything(balance)
        for smaller in self._fewer_chips():
            if not self.found:
                self._everything(Balance(smaller, self.like))

    def _least_s(self, balance: Balance) -> float:
        """Returns seconds that no step on a balance's chips takes less than, in slices too: these
        attend to no fewer keys than as many short sequences do.
        """
        if not self.like.has_slices:
            return balance.bound_s()
        shorter = of_shorter(self.like, self._slices)
        return Balance(balance.cluster, shorter).bound_s() if shorter else 0.0

    @property
    def _slices(self) -> int:
        return max(pipeline.slices for pipeline in self.like.pipelines)

    def rescue(self) -> None:
        """Cuts sequences, then spreads experts, then both, if no other plan was found to fit."""
        clusters = (self.cluster, *self._fewer_chips())
        for cluster in clusters:
            if not self.found:
                self._try_parts(cluster)
        if self.like.model.expert_parallel_problem() is not None:
            return
        self.spreads = True
        for cluster in clusters:
            if not self.found:
                balance = Balance(cluster, self.like)
                self._try("skeletons", balance, skeletons(cluster, self.like.model, balance.power))
        for cluster in clusters:
            if not self.found:
                self._try_parts(cluster)

    def _fewer_chips(self) -> Iterator[Cluster]:
        fewer = (self.cluster.kept(range(n)) for n in _fewer(self.cluster.world_size))
        return filter(self._may_do, fewer)

    def _may_do(self, smaller: Cluster) -> bool:
        return set(smaller.node_names).issuperset(self.nodes)

    def _everything(self, balance: Balance) -> None:
        cluster = balance.cluster
        for sequences in dict.fromkeys((1, _sequences(self.like))):
            self.ask("exact", cluster, sequences=sequences)
        if cluster.world_size <= SMALL:
            self.ask("exact", cluster, uneven_layers=True, stage_degrees=True)
            self.ask("autohet", cluster)
        self._try("skeletons", balance, skeletons(cluster, self.like.model, balance.power))

    def ask(self, name: str, cluster: Cluster, **options: Any) -> None:
        """Adds the plans that a planner finds for a cluster."""
        with suppress(ProfileError):  # what was not measured is not planned with
            verdict = ask(name, self._request(cluster, **options), simulated=2)
            for judged in verdict.judged:
                self._add(_Candidate(cluster, judged))
            if verdict.error:
                self.errors.append(verdict.error)

    def _request(self, cluster: Cluster, **options: Any) -> Request:
        like = self.like
        return Request(
            cluster=cluster,
            model=like.model,
            global_batch=like.global_batch,
            zero_stage=like.zero_stage,
            optimizer=like.optimizer,
            schedule=like.schedule,
            **options,
        )

    def _add(self, candidate: _Candidate) -> None:
        """Adds a plan that planners know to fit, if there is room for what they do not know of."""
        try:
            check_memory(candidate.judged.plan, candidate.cluster, self.documents_apart)
        except PlanError as error:
            self.errors.append(DoesNotFitError(str(error), candidate.judged.plan))
        else:
            self.found.append(candidate)

    def _try(self, name: str, balance: Balance, tried: Iterable[Skeleton]) -> None:
        """Adds the best plans on skeletons, judged in the order of their estimates.

        Of those whose experts are spread a few are enough, as each takes long to trace.
        """
        judged = 0
        for tries, candidate in enumerate(self._candidates(balance, tried)):
            enough = tries >= SPREAD or candidate.cost_s > NEAR * self.best_s
            if self.spreads and (enough if self.found else tries >= FAILED):
                break
            if judged * balance.cluster.world_size >= SIMULATED:
                break
            judged += self._judge(name, candidate, balance)

    def _candidates(self, balance: Balance, tried: Iterable[Skeleton]) -> Iterator[Candidate]:
        """Yields plans on skeletons, the fastest first: such as memory holds, as far as is
        estimated, or such as memory might hold with experts spread or in slices.
        """
        more = self.spreads or self.like.has_slices
        sketches: list[tuple[float, Sketch]] = []
        for skeleton in dict.fromkeys(tried):
            with suppress(ProfileError):
                sketches += [(balance.estimate_s(s), s) for s in balance.sketches(skeleton)]
        for _, sketch in sorted(sketches):
            for capped in (True, False)[: 1 + more]:
                with suppress(ProfileError):
                    if candidate := balance.candidate(sketch, capped):
                        yield candidate

    def _try_parts(self, cluster: Cluster, tried: Sequence[Skeleton] = ()) -> None:
        """Adds plans that cut sequences: on some skeletons, or on the best of a cluster's.

        As short sequences attend to fewer keys than parts do, what these take at least holds.
        """
        model = self.like.model
        for factor in self._factors(cluster):
            if (shorter := of_shorter(self.like, factor)) is None:
                continue
            balance = Balance(cluster, shorter)
            self.bound_s = min(self.bound_s, balance.bound_s())
            of_cluster = skeletons(cluster, shorter.model, balance.power)
            for tries, short in enumerate(self._candidates(balance, tried or of_cluster)):
                enough = tries >= PARTED or (short.cost_s > NEAR * self.best_s and not tried)
                if (enough and self.found) or (self.spreads and tries >= FAILED):
                    break
                with suppress(ModelError):  # too few tokens for so many parts
                    plans = in_parts(short.plan, model, factor, balance.power)
                    any(self._judge("parts", Candidate(p, short.cost_s), balance) for p in plans)

    def _factors(self, cluster: Cluster) -> Iterator[int]:
        """Yields how many times as short sequences may be, of which parts are made.

        The last may be more than there are chips, which then have unlike numbers of them.
        """
        stages = (stage for pipeline in self.like.pipelines for stage in pipeline.stages)
        degree = max(stage.cp for stage in stages)
        most = degree if degree > 1 else USUAL_PARTS
        if len(Freedom(self._request(cluster, context_parallel=most)).context_parallel) > 1:
            most = min(most, 2 * cluster.world_size - 1)
            yield from (1 << n for n in range(1, most.bit_length()))

    def _judge(self, name: str, candidate: Candidate, balance: Balance) -> bool:
        """Adds a plan if it can run, and the same with its experts spread, where they may be, or
        in as many slices as the old one.

        Returns whether one of them can.
        """
        plans = [candidate.plan]
        if self.spreads and (other := spread(candidate.plan, balance.power, self.expert_capacity)):
            plans.append(other)
        if self.like.has_slices:
            roomier = with_each(candidate.plan, lambda stage: replace(stage, recompute=True))
            ways = (
                sliced(plan, self._slices, way)
                for plan in (candidate.plan, roomier)
                for way in (BY_WORK, EVEN)
            )
            plans += [plan for plan in dict.fromkeys(ways) if plan is not None]
        before = len(self.found)
        for plan in plans:
            # a schedule may ask for more than there is, and memory be less than estimated
            with suppress(PlanError, ProfileError):
                validate(plan)
                check_memory(plan, balance.cluster, self.documents_apart)
                own = Candidate(plan, candidate.cost_s)
                result = Result(name, own, [], self._bound_of(plan), 1)
                judged = judge(own, result, balance.cluster)
                self.found.append(_Candidate(balance.cluster, judged))
        return len(self.found) > before

    def _bound_of(self, plan: Plan) -> float:
        """Returns a bound of plans like this one; none is known where experts are spread: on
        another chip type than the rest of a layer they may take less.
        """
        return 0.0 if plan.has_expert_parallelism else self.bound_s

    def relax(self) -> None:
        """Gives the best few the slack that memory has room for."""
        if self.like.schedule != "1f1b":
            return
        for found in sorted(self.found, key=lambda found: found.step_s)[:RELAXED]:
            plan, cost_s = found.judged.plan, found.judged.cost_s
            result = Result(_planner(plan), Candidate(plan, cost_s), [], self._bound_of(plan), 1)
            judged = relaxed(found.judged, result, found.cluster)
            self._add(replace(found, judged=judged))

    def chosen(self) -> _Candidate:
        """Returns the plan that moves the least state among those about as fast as the best."""
        near = sorted(self.found, key=lambda found: found.step_s)
        near = [found for found in near if found.step_s <= NEAR * self.best_s][:COMPARED]
        ranks = {member: rank for rank, member in enumerate(self.old_members)}
        counted = (
            replace(
                found,
                moved_bytes=moved_bytes(
                    self.old, found.judged.plan, [ranks.get(m) for m in found.cluster.members]
                ),
            )
            for found in near
        )
        return min(counted, key=lambda found: (found.moved_bytes, found.step_s))


def _planner(plan: Plan) -> str:
    assert plan.prediction is not None  # it was judged
    return plan.prediction.planner


def _sequences(plan: Plan) -> int:
    """Returns the most sequences of a micro-batch that one replica takes."""
    return max(r.batch_share for p in plan.pipelines for s in p.stages for r in s.replicas)


def _smaller(cluster: Cluster) -> Iterator[Cluster]:
    """Yields smaller clusters: one whose nodes have a power of two of chips each, and one for each
    chip type alone.
    """
    everything = tuple(range(cluster.world_size))
    even = tuple(rank for node in cluster.nodes for rank in _even(node.ranks))
    alone = (tuple(cluster.ranks_of(name)) for name in cluster.chip_names())
    for ranks in dict.fromkeys((even, *alone)):
        if ranks != everything:
            yield cluster.kept(ranks)


def _even(ranks: range) -> range:
    return ranks[: 1 << (len(ranks).bit_length() - 1)]


def _fewer(chips: int) -> list[int]:
    """Returns the numbers of chips to try where no plan uses all of them, largest first."""
    return sorted({chips - 1, *(1 << n for n in range((chips - 1).bit_length()))} - {0})[::-1]
