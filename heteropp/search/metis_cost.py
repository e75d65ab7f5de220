"""Metis's cost of a plan, corrected where its tool errs.

A plan is an arrangement of stages on consecutive chips of a line, in which the nodes of one chip
type stand together, with a degree of data and of tensor parallelism and the layers of each stage.
With b micro-batches it takes

    T =  (b - 1) max_s L_s + sum_s L_s   execution: L_s is the time of a stage's layers for one
                                         micro-batch, that of its slowest replica
       + b F_last                        between: what a micro-batch takes beyond its layers
       + max_s U n_s / (N tp_s)          update: the optimizer's time for the whole model, by the
                                         stage's n_s of N layers
       + max_s 2 (dp_s - 1) P_s / (dp_s tp_s W_s)   gradients: an all-reduce of the stage's P_s
                                         bytes of parameters over its replicas
       + sum_s A_s / V_s                 activations: one transfer of a replica's to the next stage
       + b G                             data: making a micro-batch's

L, F, U, P and G come from profiles (heteropp.search.metis_files). The bandwidths W and V are the
cluster's: that inside a node where all chips concerned stand on one (W that of a collective of dp
ranks, where it was measured), else the least between nodes of the types concerned. A stage shares a
micro-batch out in proportion to its replicas' speed at one sequence; what rounding leaves goes to
the largest remainders.

A stage's layers fit where MEMORY_COEFFICIENT times the profiled memory of a replica, or of all its
replicas together where they are of several types, is no more than the memory of all its chips. That
is the tool's rule, and no promise: a request's problem has each chip hold its own.

The formula is that of the public tool (github.com/SamsungLabs/Metis, HeteroCostEstimator), but for
these errors of the tool:
- execution: from its second order of types on it costs a two-stage plan's first stage alone;
- execution: its balancer loses layers; here every layer is held;
- gradients and activations: between nodes it takes the bandwidth inside a node;
- gradients: a chip reduces with the chips of its own index in the other replicas; the tool's groups
  have tp members, dp apart;
- update and data: U and G are those of tp 1 and batch 1, U of the stage's own types; the tool takes
  those of the first file that the folder lists;
- activations: bytes of hidden states; the tool counts elements, and logits before the last layer;
- memory: looked up for the stage's own types and shares; the tool takes the cluster's;
- batches: a replica has at least one sequence and none is lost; the tool rounds down.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from dataclasses import dataclass, fields

from heteropp.search.metis_problem import Problem, Row, Sums

Degrees = tuple[tuple[int, int], ...]  # (dp, tp) by stage: Metis's strategies
Boundaries = tuple[int, ...]  # the first layer of each stage, then the number of layers


@dataclass(frozen=True)
class Arrangement:
    """Metis's inter-stage plan."""

    order: tuple[str, ...]  # of the chip types along the line
    groups: tuple[int, ...]  # chips of each stage
    micro_batches: int


@dataclass(frozen=True)
class MetisPlan:
    arrangement: Arrangement
    degrees: Degrees
    boundaries: Boundaries


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, by the terms of the formula."""

    execution_s: float
    between_s: float
    update_s: float
    gradients_s: float
    activations_s: float
    data_s: float

    @property
    def total_s(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Limit:
    """Memory that the layers of a stage must fit into."""

    held_bytes: Sums
    kept_bytes: Sums  # for each micro-batch in flight
    capacity_bytes: float


@dataclass(frozen=True)
class DeviceGroup:
    """The chips of one stage at one tensor-parallel degree."""

    types: tuple[str, ...]
    shares: tuple[int, ...]  # sequences of a micro-batch, by replica
    rows: tuple[Row, ...]  # of its unlike replicas
    update_s: float  # a layer
    gradients_s: float  # a byte of parameters
    activation_bytes: float
    limits: tuple[Limit, ...]

    def seconds(self, first: int, last: int) -> float:
        """Returns the slowest replica's seconds of layers [first, last) for one micro-batch."""
        return max(row.seconds[last] - row.seconds[first] for row in self.rows)

    def memory(self, first: int, last: int, in_flight: int) -> tuple[float, float]:
        """Returns the bytes that layers [first, last) need and those there are, where tightest."""
        pairs = []
        for limit in self.limits:
            held = limit.held_bytes[last] - limit.held_bytes[first]
            kept = limit.kept_bytes[last] - limit.kept_bytes[first]
            pairs.append((max(1.0, held + in_flight * kept), limit.capacity_bytes))
        return max(pairs, key=lambda pair: pair[0] / pair[1])


class Line:
    """The chips in one order of their types, and the groups that stages may have of them."""

    def __init__(self, problem: Problem, order: tuple[str, ...]) -> None:
        self.problem = problem
        nodes = [node for chip in order for node in problem.nodes if node.chip == chip]
        self.types = [node.chip for node in nodes for _ in range(node.chips)]
        self.nodes = [index for index, node in enumerate(nodes) for _ in range(node.chips)]
        self._groups: dict[tuple[int, int, int, int], DeviceGroup | None] = {}
        self._bandwidths: dict[tuple[int, int], float] = {}

    def group(self, first: int, size: int, tp: int, micro_batches: int) -> DeviceGroup | None:
        """Returns the group of the chips [first, first + size); None where it can hold no stage."""
        key = (first, size, tp, micro_batches)
        if key not in self._groups:
            self._groups[key] = self._make_group(*key)
        return self._groups[key]

    def bandwidth(self, first: int, last: int) -> float:
        """Returns the bytes per second of the slowest link among the chips [first, last)."""
        if (first, last) not in self._bandwidths:
            problem, types = self.problem, set(self.types[first:last])
            one_node = self.nodes[first] == self.nodes[last - 1]
            table = problem.intra_bytes_per_s if one_node else problem.inter_bytes_per_s
            self._bandwidths[first, last] = min(table[chip] for chip in types)
        return self._bandwidths[first, last]

    def across(self, first: int, dp: int, tp: int) -> float:
        """Returns the bytes per second that the replicas of a stage meet, whose chips begin at
        `first`: a measured group's where they are on one node.
        """
        last = first + (dp - 1) * tp
        if self.nodes[first] == self.nodes[last]:
            return self.problem.collective_bytes_per_s[self.types[first]][dp]
        return self.bandwidth(first, last + 1)

    def _make_group(self, first: int, size: int, tp: int, micro_batches: int) -> DeviceGroup | None:
        problem, dp = self.problem, size // tp
        heads = range(first, first + size, tp)
        if size % tp or tp not in problem.degrees:
            return None
        if any(self.nodes[head] != self.nodes[head + tp - 1] for head in heads):
            return None  # tensor parallelism is profiled inside a node
        types = [self.types[head] for head in heads]
        shares = share_out(problem, types, tp, problem.global_batch // micro_batches)
        if min(shares) < 1:
            return None
        kinds = sorted(set(zip(types, shares, strict=True)))
        rows = [problem.row(chip, tp, share) for chip, share in kinds]
        if None in rows:
            return None
        # the chips of one index, from the first replica's to the last one's
        across = self.across(first, dp, tp)
        return DeviceGroup(
            types=tuple(types),
            shares=tuple(shares),
            rows=tuple(row for row in rows if row),
            update_s=max(problem.profiles.update_s[chip] for chip in types)
            / (problem.profiles.layers * tp),
            gradients_s=2 * (dp - 1) / (dp * tp * across),
            activation_bytes=problem.activation_bytes * max(shares),
            limits=self._limits(types, shares, tp),
        )

    def _limits(self, types: list[str], shares: list[int], tp: int) -> tuple[Limit, ...]:
        counted, capacity_bytes = [], 0.0
        for (chip, share), count in sorted(Counter(zip(types, shares, strict=True)).items()):
            row = self.problem.row(chip, tp, share)
            assert row is not None
            bytes_ = zip(row.held_bytes, row.divided_bytes, strict=True)
            held = tuple(whole + divided / len(types) for whole, divided in bytes_)
            counted.append((count, Limit(held, row.kept_bytes, row.capacity_bytes)))
            capacity_bytes += count * tp * row.capacity_bytes
        if not self.problem.pooled:
            return tuple(limit for _, limit in counted)
        if len(set(types)) == 1:
            counted = [(1, counted[-1][1])]  # of the largest share
        return (
            Limit(
                _weighted([(count, limit.held_bytes) for count, limit in counted]),
                _weighted([(count, limit.kept_bytes) for count, limit in counted]),
                capacity_bytes,
            ),
        )


def _weighted(tables: list[tuple[int, Sums]]) -> Sums:
    counts = [count for count, _ in tables]
    columns = zip(*(values for _, values in tables), strict=True)
    return tuple(sum(map(operator.mul, column, counts)) for column in columns)


def share_out(problem: Problem, types: list[str], tp: int, micro_batch: int) -> list[int]:
    """Returns the sequences of a micro-batch that each replica takes, by its chips' speed.

    types: each replica's chip type.
    """
    speeds = []
    for chip in types:
        row = problem.row(chip, tp, 1)
        speeds.append(1 / row.seconds[-1] if row else 0.0)
    total = sum(speeds)
    if not total:
        return [0] * len(types)
    exact = [micro_batch * speed / total for speed in speeds]
    shares = [int(share + 1e-9) for share in exact]
    rest = micro_batch - sum(shares)
    by_remainder = sorted(range(len(types)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[:rest]:
        shares[index] += 1
    return shares


def cost(problem: Problem, line: Line, plan: MetisPlan) -> Cost:
    """Returns the cost of a plan, in which every stage must have a group."""
    micro_batches, groups = plan.arrangement.micro_batches, plan.arrangement.groups
    execution, update, gradients, activations_s, first = [], 0.0, 0.0, 0.0, 0
    stages = zip(groups, plan.degrees, itertools.pairwise(plan.boundaries), strict=True)
    group = None
    for stage, (size, (_, tp), layers) in enumerate(stages):
        group = line.group(first, size, tp, micro_batches)
        assert group is not None
        execution.append(group.seconds(*layers))
        update = max(update, group.update_s * (layers[1] - layers[0]))
        size_bytes = problem.parameter_sums[layers[1]] - problem.parameter_sums[layers[0]]
        gradients = max(gradients, group.gradients_s * size_bytes)
        if stage < len(groups) - 1:
            last = first + size + groups[stage + 1]
            activations_s += group.activation_bytes / line.bandwidth(first, last)
        first += size
    assert group is not None
    return Cost(
        execution_s=(micro_batches - 1) * max(execution) + sum(execution),
        between_s=micro_batches * max(row.between_s for row in group.rows),
        update_s=update,
        gradients_s=gradients,
        activations_s=activations_s,
        data_s=micro_batches * problem.profiles.batch_s,
    )
