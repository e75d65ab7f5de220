"""The order in which a stage computes under each schedule: F and B, or F, I and W.

A function gives the (kind, micro-batch, ministage) of one stage of `stages`. Backwards of a
ministage go through the micro-batches in ascending order, so that gradients are summed in the
order of a plain training loop. Those of a micro-batch in slices go through these in descending
order, as later tokens' backwards give gradients to the keys and values of earlier ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from heteropp.schedule.action import Kind

Work = tuple[Kind, int, int]  # kind, micro-batch, ministage
Order = Callable[[int, int, int, int], Iterable[Work]]  # stages, stage, micro-batches, ministages


def one_f_one_b(stages: int, stage: int, micro_batches: int, _: int = 1) -> list[Work]:
    """Stage s of P runs P - s - 1 forwards ahead, then alternates."""
    ahead = min(stages - 1 - stage, micro_batches)
    forwards = [(Kind.F, i, 0) for i in range(micro_batches)]
    backwards = [(Kind.B, i, 0) for i in range(micro_batches)]
    return _alternate(forwards, backwards, ahead)


def gpipe(_stages: int, _stage: int, micro_batches: int, ministages: int) -> list[Work]:
    """All micro-batches through a ministage, then the next; backward reversed (Zorse, 4.1.1)."""
    return [
        *((Kind.F, i, k) for k in range(ministages) for i in range(micro_batches)),
        *((Kind.B, i, k) for k in reversed(range(ministages)) for i in range(micro_batches)),
    ]


def interleaved(stages: int, stage: int, micro_batches: int, ministages: int) -> list[Work]:
    """Megatron's order: groups of P micro-batches go through ministage after ministage.

    Micro-batches that do not fill the last group are run as if they did.
    """
    if ministages == 1:
        return one_f_one_b(stages, stage, micro_batches)
    filled = -(-micro_batches // stages) * stages
    turns = [
        (group + i, k)
        for group in range(0, filled, stages)
        for k in range(ministages)
        for i in range(stages)
    ]
    forwards = [(Kind.F, i, k) for i, k in turns]
    backwards = [(Kind.B, i, ministages - 1 - k) for i, k in turns]
    ahead = min(2 * (stages - 1 - stage) + (ministages - 1) * stages, len(turns))
    return _only(micro_batches, _alternate(forwards, backwards, ahead))


def zb_h1(stages: int, stage: int, micro_batches: int, _: int = 1) -> list[Work]:
    """1F1B whose stage s puts each W off by s backwards; what is left of them fills the end.

    So no stage holds more micro-batches than the first of 1F1B does (Zero Bubble, section 3.1).
    """
    return put_off(one_f_one_b(stages, stage, micro_batches), stage)


def put_off(works: Iterable[Work], slack: int) -> list[Work]:
    """Returns 1F1B's order with each backward split into I and W, and each W put off by `slack`
    backwards; the Ws that are left then fill the end.
    """
    order: list[Work] = []
    late: deque[Work] = deque()
    for kind, i, k in works:
        if kind == Kind.F:
            order.append((kind, i, k))
            continue
        order.append((Kind.I, i, k))
        late.append((Kind.W, i, k))
        if len(late) > slack:
            order.append(late.popleft())
    return [*order, *late]


def zb_v(stages: int, stage: int, micro_batches: int, _: int = 2) -> list[Work]:
    """Two ministages in a V, from the first stage down to the last and back up.

    A stage holds as much as the first of 1F1B does, and no one idles between its first and last
    action where F, I and W take equally long (Pipeline Parallelism with Controllable Memory).
    Fewer than 2 P micro-batches are run as if they were as many.
    """
    count = max(micro_batches, 2 * stages)
    order: list[Work] = []
    done = {(kind, k): 0 for kind in (Kind.F, Kind.I, Kind.W) for k in (0, 1)}

    def run(*works: tuple[Kind, int]) -> None:
        for kind, k in works:
            if done[kind, k] < count:
                order.append((kind, done[kind, k], k))
                done[kind, k] += 1

    down, up = 0, 1
    for _ in range(2 * (stages - stage) - 1):
        run((Kind.F, down))
    for _ in range(stage):
        run((Kind.F, up), (Kind.F, down))
    for _ in range(stages - stage):
        run((Kind.F, up), (Kind.I, up), (Kind.W, up))
    while done[Kind.F, up] < count:
        run((Kind.F, down), (Kind.I, down), (Kind.W, down))
        run((Kind.F, up), (Kind.I, up), (Kind.W, up))
    for _ in range(stage):
        run((Kind.I, down), (Kind.I, up))
    for _ in range(stages - stage):
        run((Kind.I, down), (Kind.W, down))
    for _ in range(stages):
        run((Kind.W, up))
    for _ in range(stages):
        run((Kind.W, down))
    return _only(micro_batches, order)


def chimera(stages: int, stage: int, micro_batches: int, _: int = 2) -> list[Work]:
    """Two pipelines at once, one from each end (Chimera: Efficiently Training ... Pipelines).

    Ministage 0 takes every other micro-batch on the way down, ministage 1, which has the mirrored
    stage's layers, the others on the way up. Who is free takes the backward, else the forward,
    that can begin first where F, I and W take equally long; so stages idle for P - 2 of these in
    all, and hold no more than the first of 1F1B does.
    """
    return _both_ways(stages, micro_batches)[stage]


@lru_cache(maxsize=256)
def _both_ways(stages: int, micro_batches: int) -> list[list[Work]]:
    counts = [(micro_batches + 1) // 2, micro_batches // 2]  # down, and up
    clock = [0] * stages
    orders: list[list[Work]] = [[] for _ in range(stages)]
    forwards, backwards = [[0] * stages, [0] * stages], [[0] * stages, [0] * stages]
    arrived: dict[tuple[Kind, int, int, int], int] = {}  # kind, way, number, depth: when

    def choices(s: int) -> Iterable[tuple[int, bool, int, int, int, int]]:
        """Yields what stage s could run next, as keys of which the least goes first.

        A key is when it could begin, whether it is a forward, its number, its negated depth, the
        stage, and the way.
        """
        held = sum(forwards[way][s] - backwards[way][s] for way in (0, 1))
        for way in (0, 1):
            depth = stages - 1 - s if way else s
            ahead = forwards[way][s] - backwards[way][s]
            i = backwards[way][s]
            if ahead and (Kind.B, way, i, depth) in arrived:
                yield max(clock[s], arrived[Kind.B, way, i, depth]), False, i, -depth, s, way
            i = forwards[way][s]
            if i < counts[way] and ahead < stages - depth and held < stages:
                when = 0 if depth == 0 else arrived.get((Kind.F, way, i, depth))
                if when is not None:
                    yield max(clock[s], when), True, i, -depth, s, way

    for _ in range(2 * micro_batches * stages):
        begin, forward, i, depth, s, way = min(c for s in range(stages) for c in choices(s))
        depth = -depth
        if forward:
            forwards[way][s] += 1
            clock[s] = begin + 1
            last = depth == stages - 1
            arrived[(Kind.B, way, i, depth) if last else (Kind.F, way, i, depth + 1)] = begin + 1
        else:
            backwards[way][s] += 1
            clock[s] = begin + 2
            arrived[Kind.B, way, i, depth - 1] = begin + 1
        orders[s].append((Kind.F if forward else Kind.B, 2 * i + way, way))
    return orders


ORDERS: dict[str, Order] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "chimera": chimera,
}


@lru_cache(maxsize=4096)
def order(
    schedule: str, stages: int, stage: int, micro_batches: int, ministages: int
) -> tuple[Work, ...]:
    return tuple(ORDERS[schedule](stages, stage, micro_batches, ministages))


def in_parts(works: Iterable[Work], parts: int, ends: Collection[int]) -> list[Work]:
    """The order of a stage that runs each micro-batch in parts, as micro-batches of its own.

    `ends`: the ministages with the model's last layer. Their forward and the backward right after
    it, and any W, take turns part by part, so that a part's activations are let go as soon as they
    can be; no other stage has to act in between.
    """
    groups: list[list[Work]] = []
    for work in works:
        before = groups[-1][-1] if groups else None
        if work[0] == Kind.W:
            follows = before is not None and before[0] == Kind.I
        else:
            follows = work[2] in ends and before == (Kind.F, *work[1:])
        if not follows:
            groups.append([])
        groups[-1].append(work)
    return [
        (kind, i * parts + part, k)
        for group in groups
        for part in range(parts)
        for kind, i, k in group
    ]


def in_slices(
    schedule: str, stages: int, stage: int, micro_batches: int, slices: int
) -> list[Work]:
    """The order of a stage that runs each micro-batch in slices, as micro-batches of its own.

    The last stage's first backward needs all slices of its micro-batch, so that every stage of 1F1B
    runs as many more forwards ahead.
    """
    last = slices - 1
    works = order(schedule, stages + last, stage, micro_batches * slices, 1)
    return [
        (kind, i if kind == Kind.F else i // slices * slices + last - i % slices, k)
        for kind, i, k in works
    ]


def _alternate(forwards: list[Work], backwards: list[Work], ahead: int) -> list[Work]:
    """`ahead` forwards, then one forward and one backward in turn, then the rest."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _only(micro_batches: int, order: list[Work]) -> list[Work]:
    """Returns an order without the micro-batches that only fill its last group."""
    return [work for work in order if work[1] < micro_batches]
