"""The bound on the step, from what chips take, what nodes pass, and how long a sequence is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy

from heteropp.cost.communication import NO_LINK
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link
from heteropp.description.profile import chip_profile
from heteropp.models.spec import ModelSpec
from heteropp.search.auto.bound.nodes import NodeKind, Work, all_done, most_done
from heteropp.search.auto.bound.ways import Sizes, Ways, sizes, ways
from heteropp.search.auto.freedom import Freedom
from heteropp.search.planner import Request

ROUNDING = 1e-9  # relative, of sums in another order
NEAR = 1e-4  # relative: how near the largest bound is found
# what a second of a sequence's way is worth, in what one chip does of a sequence in a step
WORTHS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)


def step_bound_s(request: Request, freedom: Freedom, cluster: Cluster) -> float:
    """Returns seconds that no step of any plan on these chips, or on some of them, takes less than.

    Two things hold of each plan, whatever its schedule. All blocks of all sequences, both ends of
    the model and the update of every parameter are work of some chip, which has one step for it.
    And a sequence goes through the model one block after another, forward and then backward, always
    as one of the sequences that a replica has at once: the more these are, the better chips work,
    but the longer the sequence takes, which has one step for it too. Where sequences may be cut, it
    is as fast as its slowest part, or slice.

    So a second of a sequence's way is given a price in work, and so is each piece of the model: the
    least for which a chip of some type does it, working as well as it can and paying for the
    sequences' way. No chip then earns more than its best way to work on blocks gives it. Where all
    chips' earnings and the price of all sequences' steps are less than the price of the batch, the
    step is too short. That is so for any price of the way; several are tried.

    Where experts may lie over ranks, another chip may do a sequence's experts than does the rest of
    a block. So both have prices of their own, experts are no part of a sequence's way, and NICs,
    through which rows may come that are no boundary tensors, limit nobody.
    """
    nodes = Counter((node.chip_name, node.chip, len(node.ranks)) for node in cluster.nodes)
    largest: dict[str, int] = {}  # node of each chip type
    alike: Counter[str] = Counter()  # chips of each type
    for (name, _, chips), count in nodes.items():
        largest[name] = max(chips, largest.get(name, 0))
        alike[name] += chips * count
    parts = {name: min(max(freedom.context_parallel), count) for name, count in alike.items()}
    slices = max(freedom.token_slices)
    known = {
        name: found
        for name, chip, _ in nodes
        if (found := _ways(request, freedom, chip, name, largest[name], max(parts[name], slices)))
    }
    if not known or any(own.block_s.min() <= 0 for own in known.values()):
        return 0.0  # nobody can work, or somebody takes no time
    kinds = [
        NodeKind.of(request.model, name, chip, chips, count, parts[name])
        for (name, chip, chips), count in nodes.items()
        if name in known
    ]
    problem = _StepProblem.of(request, known, kinds, freedom.expert_parallel > 1)
    bound_s = 0.0
    for worth in WORTHS:
        bound_s = problem.raised(bound_s, worth)
    return bound_s * (1 - ROUNDING)


def _ways(
    request: Request, freedom: Freedom, chip: ChipSpec, name: str, chips: int, parts: int
) -> Ways | None:
    profile = chip_profile(request.cluster, name)
    if profile is None:
        least = 1 if freedom.sequences_open else request.sequences
        found: tuple[Sizes, ...] = sizes(least, request.global_batch)
    else:
        found = tuple((n, n) for n in sorted({sequences for *_, sequences in profile.found}))
    cuts = freedom.sequence_parallel
    spread = freedom.expert_parallel > 1
    pair = _fastest_pair(request.cluster, name)
    return ways(
        *(request.model, chip, chips, pair, request.optimizer, found, cuts, parts, profile, spread)
    )


def _fastest_pair(cluster: Cluster, name: str) -> Link:
    """Returns a link as fast as any between two chips of a node of one type."""
    firsts = [n.ranks.start for n in cluster.nodes if n.chip_name == name and len(n.ranks) > 1]
    links = [cluster.link(first, first + 1) for first in firsts] or [NO_LINK]
    return Link(min(link.latency_s for link in links), max(link.bytes_per_s for link in links))


@dataclass(frozen=True, eq=False)
class _StepProblem:
    """What has to be done in a step, by whom."""

    batch: int  # sequences
    counts: numpy.ndarray  # of each piece in the model
    updated: numpy.ndarray  # of each piece, parameters of its own
    ways: dict[str, Ways]  # by chip type
    kinds: list[NodeKind]
    spread: bool  # whether experts may lie over ranks

    @classmethod
    def of(
        cls, request: Request, known: dict[str, Ways], kinds: list[NodeKind], spread: bool
    ) -> _StepProblem:
        counts = _counts(request.model)
        updated = counts.copy()
        if request.model.tied:  # the head is the embedding, where one stage holds both
            updated[-1] = 0
        return cls(request.global_batch, counts, updated, known, kinds, spread)

    def raised(self, bound_s: float, worth: float) -> float:
        """Returns a bound raised as far as one price of a sequence's way lets it."""
        low_s, high_s = bound_s, max(2 * bound_s, self._alone_s())
        if bound_s and self._enough(bound_s * (1 + NEAR), worth):
            return bound_s
        while not self._enough(high_s, worth):
            low_s, high_s = high_s, 2 * high_s
        while high_s - low_s > NEAR * high_s:
            middle_s = (low_s + high_s) / 2
            if self._enough(middle_s, worth):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _alone_s(self) -> float:
        """Returns the seconds in which the fastest chips, each on blocks, did all blocks."""
        block_s = min(own.block_s.min() for own in self.ways.values())
        chips = sum(kind.chips * kind.count for kind in self.kinds)
        return float(self.batch * self.counts.sum() * block_s / chips)

    def _enough(self, step_s: float, worth: float) -> bool:
        """Whether a step of so many seconds may be long enough, for all that one price says."""
        chain_price = worth * self.counts.sum() / step_s  # of a second of one sequence's way
        speed = {
            name: float(((1 - chain_price * own.chain_s[:, 0]) / own.block_s).max())
            for name, own in self.ways.items()
        }
        speed = {name: max(0.0, own) for name, own in speed.items()}
        prices = numpy.min(
            [
                (speed[name] * own.chip_s + chain_price * own.chain_s).min(axis=0)
                for name, own in self.ways.items()
            ],
            axis=0,
        )
        update_prices = numpy.min(
            [(speed[name] * own.update_s).min(axis=0) for name, own in self.ways.items()], axis=0
        )
        of_experts = numpy.min(
            [(speed[name] * own.expert_s).min(axis=0) for name, own in self.ways.items()], axis=0
        )
        sequence = float(prices @ self.counts) + float(of_experts @ self.counts)
        updates = float(update_prices @ self.updated)
        speeds = [speed[kind.chip_name] for kind in self.kinds]
        if self.spread:
            done = all_done(self.kinds, speeds, step_s)
        else:
            *blocks, embedding, head = map(float, prices)
            work = Work(self.batch, sequence, max(blocks), embedding, head, updates)
            done = most_done(self.kinds, speeds, work, step_s)
        return done + chain_price * self.batch * step_s >= self.batch * sequence + updates


def _counts(model: ModelSpec) -> numpy.ndarray:
    blocks = [count for _, count in model.block_counts([(0, model.layers)])]
    return numpy.array([*blocks, 1, 1], dtype=float)
