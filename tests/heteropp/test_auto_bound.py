"""The default planner against brute force: every plan of a few chips, each of them simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from clusters import random_chip, tiny_model
from sampled import sampled
from tiny_decoders import tiny_config

from heteropp import token_shares
from heteropp.cost.capacity import fits
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.plan import Pipeline, Plan, PlanError, Replica, Stage, validate
from heteropp.description.schedules import SLICING
from heteropp.models.hugging_face.reading import read
from heteropp.search.auto.bound import step_bound_s
from heteropp.search.auto.bound.nodes import NodeKind, Work, most_done
from heteropp.search.auto.freedom import Freedom
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, Request
from heteropp.simulator.simulate import simulate

OPEN = frozenset({"sequences", "zero_stage"})
NEAR = 1.01  # times the best plan there is


def small_request(seed: int) -> Request:
    """Two or three chips and as many layers, one schedule."""
    generator = random.Random(f"bound {seed}")
    nodes, left = [], generator.choice([2, 2, 3])
    for name in "abc":
        size = generator.choice([1, 2]) if left > 1 else left
        if size:
            chip = random_chip(generator)
            memory = replace(chip.memory, capacity_bytes=generator.choice([200_000, 10**7]))
            links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(5, 8))
            nodes.append(Node(name, replace(chip, memory=memory, links=links), range(size)))
            left -= size
    return Request(
        cluster=Cluster("small", in_order(nodes)),
        model=tiny_model(generator.choice([2, 3])),
        global_batch=generator.choice([2, 4]),
        schedule=generator.choice(["1f1b", "gpipe", "zb-h1"]),
        open=OPEN,
    )


def every_plan(request: Request) -> Iterator[tuple[Plan, Cluster]]:
    """Every plan without recompute, on every set of chips.

    Where sequences may be cut, they are in two, equal or not; so are slices. Where experts may lie
    over ranks, they lie over all of a stage's.
    """
    cluster, batch = request.cluster, request.global_batch
    for size in range(1, cluster.world_size + 1):
        for used in itertools.combinations(range(cluster.world_size), size):
            kept = cluster.kept(used)
            for micro_batch in (n for n in range(1, batch + 1) if batch % n == 0):
                for groups in partitions(list(range(size))):
                    counts = compositions(batch // micro_batch, len(groups))
                    ways = [list(pipelines(g, request, kept, micro_batch)) for g in groups]
                    slices = ways_to_slice(request)
                    for count, chosen in itertools.product(counts, itertools.product(*ways)):
                        for zero, own in itertools.product((0, 1, 2), slices):
                            made = tuple(
                                Pipeline(micro_batches=n, stages=stages, token_slices=own)
                                for n, stages in zip(count, chosen, strict=True)
                            )
                            yield (
                                Plan(
                                    model=request.model,
                                    global_batch=batch,
                                    micro_batch=micro_batch,
                                    schedule=request.schedule,
                                    zero_stage=zero,
                                    pipelines=made,
                                ),
                                kept,
                            )


def pipelines(
    ranks: list[int], request: Request, cluster: Cluster, micro_batch: int
) -> Iterator[tuple[Stage, ...]]:
    for groups in partitions(ranks):
        for order in itertools.permutations(groups):
            for layers in compositions(request.model.layers, len(order)):
                bounds = list(itertools.accumulate(layers, initial=0))
                spans = list(itertools.pairwise(bounds))
                ways = [
                    list(stages(group, span, request, cluster, micro_batch))
                    for group, span in zip(order, spans, strict=True)
                ]
                yield from itertools.product(*ways)


def stages(
    ranks: list[int], span: tuple[int, int], request: Request, cluster: Cluster, micro_batch: int
) -> Iterator[Stage]:
    every_way = [(tp, parts) for tp in (1, 2) for parts in ways_to_cut(request, tp)]
    for tp, parts in every_way:
        if len(ranks) % (tp * len(parts or (1,))):
            continue
        groups = [tuple(ranks[at : at + tp]) for at in range(0, len(ranks), tp)]
        nodes = [{cluster.node_index(rank) for rank in group} for group in groups]
        limits = [cluster.chip(rank).tp_limit for rank in ranks]
        if any(len(own) > 1 for own in nodes) or tp > min(limits):
            continue
        size = tp * len(parts or (1,))
        held = [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]
        chips = [{cluster.node(rank).chip_name for rank in own} for own in held]
        if any(len(own) > 1 for own in chips):
            continue
        for shares in compositions(micro_batch, len(held)):
            replicas = tuple(
                Replica(ranks=own, chip=chip, batch_share=share, token_shares=parts)
                for own, (chip,), share in zip(held, chips, shares, strict=True)
            )
            for cut, experts in itertools.product(
                (False, True)[:tp], ways_to_spread(request, len(groups))
            ):
                yield Stage(
                    layers=span,
                    recompute=False,
                    replicas=replicas,
                    sequence_parallel=cut,
                    expert_shares=experts,
                )


def ways_to_spread(request: Request, groups: int) -> list[tuple[int, ...] | None]:
    most = min(request.expert_parallel or 1, request.model.expert_count)
    shares = compositions(request.model.expert_count, groups) if 1 < groups <= most else []
    return [None, *shares]


def ways_to_cut(request: Request, tp: int) -> list[tuple[int, ...] | None]:
    if (request.context_parallel or 1) == 1:
        return [None]
    length = request.model.sequence_length
    return [None, token_shares(request.model, (1, 1), tp), (length - 2, 2)]


def ways_to_slice(request: Request) -> list[tuple[int, ...] | None]:
    if request.token_slices is None or request.schedule not in SLICING:
        return [None]
    length = request.model.sequence_length
    return [None, token_shares(request.model, (1, 1), 2), (length - 2, 2), (2, length - 2)]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [item for item in rest if item not in others]
            for parts in partitions(left):
                yield [[first, *others], *parts]


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [
        each for each in itertools.product(range(1, total + 1), repeat=parts) if sum(each) == total
    ]


def best_step_s(request: Request) -> float:
    """The least step of every plan; infinite where none fits."""
    best_s = float("inf")
    for plan, cluster in every_plan(request):
        try:
            validate(plan)
        except PlanError:
            continue
        if fits(plan, cluster):
            best_s = min(best_s, simulate(plan, cluster).step_s)
    return best_s


def against_brute_force(request: Request) -> None:
    best_s = best_step_s(request)
    assert step_bound_s(request, Freedom(request), request.cluster) <= best_s
    verdict = ask("auto", request, 1)
    if not verdict.judged:
        assert best_s == float("inf")
        return
    assert verdict.best.simulation.step_s <= best_s * NEAR


def cut_request(seed: int) -> Request:
    """Two or three chips of one type, together or with slow NICs, and few sequences, which may be
    cut.
    """
    generator = random.Random(f"cut {seed}")
    chip = random_chip(generator)
    memory = replace(chip.memory, capacity_bytes=generator.choice([60_000, 10**7]))
    links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(4, 8))
    chip = replace(chip, memory=memory, links=links)
    sizes = generator.choice([(2,), (1, 1), (2, 1), (3,), (1, 1, 1)])
    return Request(
        cluster=Cluster("cut", in_order([Node("a", chip, range(size)) for size in sizes])),
        model=tiny_model(2, sequence_length=32, attention=generator.choice(["explicit", "fused"])),
        global_batch=generator.choice([1, 2]),
        schedule=generator.choice(["1f1b", "gpipe", "zb-h1"]),
        open=OPEN,
        context_parallel=2,
    )


def slice_request(seed: int) -> Request:
    """Chips of one type or of two, apart, and few sequences, which may run in slices."""
    generator = random.Random(f"slices {seed}")
    nodes = []
    for name in generator.choice(["a", "ab", "ab"]):
        chip = random_chip(generator)
        memory = replace(chip.memory, capacity_bytes=generator.choice([60_000, 10**7]))
        links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(6, 9))
        node = Node(name, replace(chip, memory=memory, links=links), range(1))
        nodes += [node] * generator.choice([1, 2])
    return Request(
        cluster=Cluster("slices", in_order(nodes[:3])),
        model=tiny_model(2, sequence_length=32, attention=generator.choice(["explicit", "fused"])),
        global_batch=generator.choice([1, 2]),
        schedule=generator.choice(["1f1b", "gpipe"]),
        open=OPEN,
        token_slices=2,
    )


def expert_request(seed: int) -> Request:
    """Two chips, alike or not, perhaps apart, and a model most of which is experts."""
    generator = random.Random(f"experts {seed}")
    chips = [random_chip(generator), random_chip(generator)]
    nodes = []
    together = generator.choice([False, True])
    for name, chip in zip("ab", chips, strict=True):
        memory = replace(chip.memory, capacity_bytes=generator.choice([250_000, 10**8]))
        links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(5, 9))
        chip = replace(chip, memory=memory, links=links)
        nodes.append(Node(name, chip, range(2 if together else 1)))
    config = tiny_config(
        "mixtral",
        layers=generator.choice([1, 2]),
        hidden_size=16,
        intermediate_size=generator.choice([16, 64]),
        head_dim=4,
        vocab_size=32,
        num_local_experts=generator.choice([2, 3, 4]),
        num_experts_per_tok=2,
    )
    return Request(
        cluster=Cluster("experts", in_order(nodes[:1] if together else nodes)),
        model=read(config.to_dict(), "mixtral", sequence_length=16, dtype="float32"),
        global_batch=generator.choice([2, 4]),
        schedule=generator.choice(["1f1b", "gpipe", "zb-h1"]),
        open=OPEN,
        expert_parallel=2,
    )


def distant_request(seed: int) -> Request:
    """Three nodes of one chip and a slow NIC each, of which one may stand amid the others."""
    generator = random.Random(f"distant {seed}")
    chip = random_chip(generator)
    memory = replace(chip.memory, capacity_bytes=10**7)
    nodes = []
    for name in "abc":
        links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(4, 6))
        nodes.append(Node(name, replace(chip, memory=memory, links=links), range(1)))
    return Request(
        cluster=Cluster("distant", in_order(nodes)),
        model=tiny_model(
            3,
            vocab=generator.choice([32, 512]),
            tied_embeddings=generator.choice([False, True]),
        ),
        global_batch=generator.choice([2, 4]),
        schedule=generator.choice(["1f1b", "gpipe"]),
        open=OPEN,
    )


def open_request(seed: int) -> Request:
    """Up to twelve chips, more layers and sequences than brute force can look at, all left open."""
    generator = random.Random(f"open {seed}")
    nodes: list[Node] = []
    for name in "abc"[: generator.choice([1, 2, 3])]:
        chip = random_chip(generator)
        memory = replace(chip.memory, capacity_bytes=10**7)
        links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(5, 9))
        node = Node(
            name, replace(chip, memory=memory, links=links), range(generator.choice([1, 2]))
        )
        nodes += [node] * generator.choice([1, 2])
    return Request(
        cluster=Cluster("open", in_order(nodes)),
        model=tiny_model(generator.choice([2, 4, 8]), vocab=generator.choice([32, 512])),
        global_batch=generator.choice([4, 8, 24, 36]),
        open=frozenset(OPTIONS),
    )


def no_plan_is_faster(seed: int) -> None:
    request = open_request(seed)
    verdict = ask("auto", request, 1)
    bound_s = step_bound_s(request, Freedom(request), request.cluster)
    assert 0 < bound_s <= verdict.best.simulation.step_s


@pytest.mark.parametrize("seed", sampled([1, 0], 1, everyday=1))
def test_no_plan_found_under_any_schedule_is_faster(seed: int) -> None:
    no_plan_is_faster(seed)


@pytest.mark.parametrize("seed", sampled([9, *range(2, 9), *range(10, 16)], 14))
def test_no_plan_of_more_problems_is_faster(seed: int) -> None:
    no_plan_is_faster(seed)


def test_one_sequence_goes_no_faster_through_more_chips() -> None:
    chip = random_chip(random.Random("one sequence"))
    chip = replace(chip, memory=replace(chip.memory, capacity_bytes=10**8), kernels=None)
    bounds_s, steps_s = [], []
    for count in (1, 4):
        request = Request(
            cluster=Cluster("alike", in_order([Node("a", chip, range(1))] * count)),
            model=tiny_model(8),
            global_batch=1,
            open=OPEN,
        )
        bounds_s.append(step_bound_s(request, Freedom(request), request.cluster))
        steps_s.append(ask("auto", request, 1).best.simulation.step_s)
    assert bounds_s[0] > 0.95 * steps_s[0]
    assert bounds_s[1] > 0.6 * steps_s[1]  # all but the gradients of weights


@pytest.mark.parametrize("seed", sampled(range(40), 20, everyday=1))
def test_the_bound_holds_where_nics_are_slow(seed: int) -> None:
    request = distant_request(seed)
    assert 0 < step_bound_s(request, Freedom(request), request.cluster) <= best_step_s(request)


def test_a_node_amid_others_passes_every_sequence_twice() -> None:
    """Four nodes alike, whose NICs have time for all sequences once and for no gradients."""
    kind = NodeKind(
        chip_name="a",
        chips=1,
        count=4,
        sequences_per_s=10.0,
        summed_s=100.0,
        block_summed_s=10.0,
        embedding_summed_s=2.0,
        head_summed_s=2.0,
        tied=False,
    )
    work = Work(sequences=10, sequence=1.0, block=0.5, embedding=0.0, head=0.0, updates=0.0)
    inner = 5 * 0.5 / 10  # half of the sequences, each through what a second sums of a block
    speed = 2.0
    # one has all blocks of no other, or two have the ends and pass every sequence
    assert most_done([kind], [speed], work, 1.0) == pytest.approx(2 * inner + 2 * speed)
    tied = replace(kind, tied=True)
    assert most_done([tied], [speed], work, 1.0) == pytest.approx(3 * inner + speed)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_and_the_plan_is_about_the_best_there_is(seed: int) -> None:
    against_brute_force(small_request(seed))


@pytest.mark.parametrize("seed", sampled(range(3, 20), 16))
def test_the_bound_holds_of_more_problems(seed: int) -> None:
    against_brute_force(small_request(seed))


@pytest.mark.parametrize("seed", sampled([3, 0, 1, 2, *range(4, 20)], 20))
def test_the_bound_holds_where_sequences_are_cut(seed: int) -> None:
    against_brute_force(cut_request(seed))


@pytest.mark.exhaustive  # as is the next one, for what they trace
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_where_sequences_run_in_slices(seed: int) -> None:
    against_brute_force(slice_request(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_where_experts_lie_over_ranks(seed: int) -> None:
    against_brute_force(expert_request(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20, 300))
def test_the_bound_holds_of_many_problems(seed: int) -> None:
    against_brute_force(small_request(seed))
