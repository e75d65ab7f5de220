"""The neighbours of a draft: plans that differ in one thing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from heteropp.description.plan import Pipeline, Plan, PlanError, Replica, Stage, validate
from heteropp.description.profile import ProfileError
from heteropp.search.auto.busy import balanced, with_layers
from heteropp.search.auto.changed import offloaded, places, with_each, with_one, with_stages
from heteropp.search.auto.expert_moves import expert_parallel
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.joining import STEPS, idle_joined, shared
from heteropp.search.auto.order_moves import reordered
from heteropp.search.auto.placement_moves import placed_anew
from heteropp.search.auto.regrouping import regrouped, way_of
from heteropp.search.auto.replica_moves import exchanged, moved
from heteropp.search.auto.schedule_moves import ministages, schedules
from heteropp.search.auto.slicing import cut_anew, token_slices, whole
from heteropp.search.auto.spreading import with_shares_that_fit
from heteropp.search.auto.trials import Draft, with_pipelines
from heteropp.search.parts import ways_to_cut

SLACK = 0  # the first kind: less slack than there could be may be faster than all of it
AHEAD = (None, 0, 1, 2)  # how far stages of 1F1B may run ahead
WAYS_TO_JOIN = 3  # two stages
Kind = Iterator[Draft]


def neighbours(draft: Draft, freedom: Freedom) -> list[Kind]:
    """Returns the kinds of neighbours, those that help most often first."""
    plan, cluster = draft.plan, freedom.request.cluster
    kinds = [
        _layers(plan),
        _recompute(plan, freedom),
        _sequence_parallel(plan, freedom),
        _sizes(plan),
        _zero(plan, freedom),
        and_balanced(_degrees(plan), freedom),
        and_balanced(_context_parallel(plan, freedom), freedom),
        and_balanced(token_slices(plan, freedom), freedom),
        and_balanced(expert_parallel(plan, freedom), freedom),
        and_balanced(reordered(plan, cluster), freedom),
        and_balanced(_joined(plan, freedom), freedom),
        and_balanced(_cut(plan), freedom),
        and_balanced(schedules(plan, freedom), freedom),
        ministages(plan),
        and_balanced(moved(plan), freedom),
        placed_anew(plan, cluster),
        exchanged(plan, cluster),
        _shares(plan),
        _micro_batches(plan),
        and_balanced(_fewer(plan), freedom),
        and_balanced(idle_joined(plan, freedom), freedom),
    ]
    same = [(Draft(other, _ahead(other, draft)) for other in kind) for kind in kinds]
    return [_slack(draft), *same]


def _ahead(plan: Plan, draft: Draft) -> int | None:
    return draft.ahead if plan.schedule == "1f1b" else None


def _slack(draft: Draft) -> Kind:
    if draft.plan.schedule == "1f1b":
        for ahead in AHEAD:
            if ahead != draft.ahead:
                yield replace(draft, ahead=ahead)


def and_balanced(plans: Iterable[Plan], freedom: Freedom) -> Iterator[Plan]:
    """Yields plans whose stages are others than before, first with layers dealt anew to them."""
    for made in plans:
        plan = cut_anew(with_shares_that_fit(made, freedom))
        with suppress(PlanError, ProfileError):
            validate(plan)
            yield balanced(plan, freedom.request.cluster)
        yield plan


def _layers(plan: Plan) -> Iterator[Plan]:
    """Layers move from one stage to another, those between them shift: in all pipelines that are
    cut alike, or in one.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        alike.setdefault(tuple(stage.layer_count for stage in pipeline.stages), []).append(p)
    at_once = [(counts, own) for counts, own in alike.items() if len(own) > 1]
    single = [(counts, [p]) for counts, own in alike.items() for p in own]
    for counts, own in (*at_once, *single):
        for others in _other_counts(counts):
            pipelines = list(plan.pipelines)
            for p in own:
                stages = with_layers(pipelines[p].stages, others)
                pipelines[p] = replace(pipelines[p], stages=stages)
            yield with_pipelines(plan, pipelines)


def _other_counts(counts: Sequence[int]) -> Iterator[list[int]]:
    for i, j in itertools.permutations(range(len(counts)), 2):
        for step in STEPS:
            if counts[i] > step:
                others = list(counts)
                others[i] -= step
                others[j] += step
                yield others


def _recompute(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Recompute on or off, of all stages at once or of one, or of attention alone; or offload."""
    modes = [(False, False), (True, False)]
    if freedom.selective_recompute:
        modes.insert(1, (False, True))
    for mode in modes:
        yield with_each(plan, partial(_again, mode))
    for p, s, stage in places(plan):
        for mode in modes:
            yield with_one(plan, p, s, _again(mode, stage))
    for change in (offloaded, lambda stage: replace(stage, offload=False)):
        for p, s, stage in places(plan):
            if (changed := change(stage)) != stage:
                yield with_one(plan, p, s, changed)
        yield with_each(plan, change)


def _again(mode: tuple[bool, bool], stage: Stage) -> Stage:
    whole, attention = mode
    return replace(stage, recompute=whole, selective_recompute=attention)


def _sequence_parallel(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    if True not in freedom.sequence_parallel:
        return
    for cut in (True, False):
        yield with_each(plan, partial(_rows, cut))
    for p, s, stage in places(plan):
        yield with_one(plan, p, s, _rows(not stage.sequence_parallel, stage))


def _rows(cut: bool, stage: Stage) -> Stage:
    return replace(stage, sequence_parallel=cut and stage.tp > 1)


def _sizes(plan: Plan) -> Iterator[Plan]:
    """Micro-batches twice or half as large, and the other way round as many; or smaller ones that
    leave room to keep all activations, in place of computing some again.
    """
    if all(pipeline.micro_batches % 2 == 0 for pipeline in plan.pipelines):
        larger = with_each(
            plan, lambda stage: shared(stage, [2 * r.batch_share for r in stage.replicas])
        )
        yield _counted(replace(larger, micro_batch=2 * plan.micro_batch), 0.5)
    smaller = _half_as_large(plan)
    if smaller:
        yield smaller
    while smaller:
        keeping = with_each(smaller, partial(_again, (False, False)))
        if keeping != smaller:
            yield keeping
        smaller = _half_as_large(smaller)


def _half_as_large(plan: Plan) -> Plan | None:
    """Returns a plan with micro-batches half as large, or None where a share is odd."""
    shares = [r.batch_share for _, _, stage in places(plan) for r in stage.replicas]
    if any(share % 2 for share in shares):
        return None
    smaller = with_each(
        plan, lambda stage: shared(stage, [r.batch_share // 2 for r in stage.replicas])
    )
    return _counted(replace(smaller, micro_batch=plan.micro_batch // 2), 2)


def _counted(plan: Plan, factor: float) -> Plan:
    return with_pipelines(
        plan,
        [replace(p, micro_batches=int(p.micro_batches * factor)) for p in plan.pipelines],
    )


def _zero(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    for stage in freedom.zero_stages:
        if stage != plan.zero_stage:
            yield replace(plan, zero_stage=stage)


def _degrees(plan: Plan) -> Iterator[Plan]:
    """Chips as tensor-parallel groups twice or half as large, of all stages at once or of one.
    Smaller groups need more memory, so they are also tried with their activations offloaded.
    """
    larger, smaller = partial(_with_tp, plan, 2), partial(_with_tp, plan, 0.5)

    def smaller_offloaded(stage: Stage) -> Stage | None:
        made = smaller(stage)
        return made and offloaded(made)

    changes = larger, smaller, smaller_offloaded
    yield from dict.fromkeys(with_each(plan, partial(_changed, change)) for change in changes)
    for p, s, stage in places(plan):
        for made in filter(None, dict.fromkeys(change(stage) for change in changes)):
            yield with_one(plan, p, s, made)


def _with_tp(plan: Plan, factor: float, stage: Stage) -> Stage | None:
    tp = int(factor * stage.tp)
    if not tp or len({replica.chip for replica in stage.replicas}) > 1:
        return None
    return regrouped(stage, plan.model, plan.micro_batch, tp, stage.cp, way_of(stage, plan.model))


def _context_parallel(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Sequences cut into other parts, in all stages at once or in one."""
    most = max(freedom.context_parallel)
    if most == 1:
        return
    plan = whole(plan)  # slices do not go with parts
    changes: list[Callable[[Stage], Stage | None]] = [
        partial(_more_or_less_even, plan, step) for step in (-1, 1)
    ]
    for more, of_ranks, at_once in itertools.product((True, False), repeat=3):
        changes.append(partial(_parts, plan, most, more, of_ranks, at_once))
    for change in changes:
        yield from _and_smaller(with_each(plan, partial(_changed, change)))
    for p, s, stage in places(plan):
        for change in changes:
            if other := change(stage):
                yield from _and_smaller(with_one(plan, p, s, other))


def _and_smaller(plan: Plan) -> Iterator[Plan]:
    """Yields a plan whose stages have changed with their micro-batches, and with smaller ones."""
    yield (plan := _as_large(plan))
    if smaller := _half_as_large(plan):
        yield smaller


def _changed(change: Callable[[Stage], Stage | None], stage: Stage) -> Stage:
    return change(stage) or stage


def _more_or_less_even(plan: Plan, step: int, stage: Stage) -> Stage | None:
    """Returns a stage whose parts are of more or less even numbers of tokens, if it has any."""
    way = way_of(stage, plan.model) + step
    if not 0 <= way < len(ways_to_cut(plan.model, stage.cp, stage.tp)):
        return None
    return regrouped(stage, plan.model, stage.micro_batch, stage.tp, stage.cp, way)


def _parts(
    plan: Plan, most: int, more: bool, of_ranks: bool, at_once: bool, stage: Stage
) -> Stage | None:
    """Returns a stage whose sequences are cut into twice as many parts or half as many, for which
    replicas join in pairs or part; None where that cannot be.

    most: parts there may be. more: twice as many. of_ranks: tensor-parallel groups part or join for
    it, in place of replicas. at_once: its micro-batch stays as large, in place of each replica's
    share.
    """
    cp = 2 * stage.cp if more else stage.cp // 2
    tp = stage.tp
    if of_ranks:
        tp = stage.tp // 2 if more else 2 * stage.tp
    if not (tp and 1 <= cp <= most) or stage.offload:
        return None
    sequences = stage.micro_batch
    if not at_once:
        sequences = sequences * stage.tp * stage.cp // (tp * cp)
    return regrouped(stage, plan.model, sequences, tp, cp, way_of(stage, plan.model))


def _as_large(plan: Plan) -> Plan:
    """Returns a plan with micro-batches of its largest stage's, and as many as these then are."""
    largest = max(stage.micro_batch for _, _, stage in places(plan))
    return _counted(replace(plan, micro_batch=largest), plan.micro_batch / largest)


def _joined(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Two neighbours become one stage: with the replicas of both, or larger ones. Or all do."""
    join = partial(_together, plan, max(freedom.context_parallel))
    for way in range(WAYS_TO_JOIN):
        yield with_pipelines(plan, [_in_pairs(p, join, way) for p in plan.pipelines])
    for p, pipeline in enumerate(plan.pipelines):
        for s, (one, other) in enumerate(itertools.pairwise(pipeline.stages)):
            for joined in join(one, other):
                yield with_stages(
                    plan, p, [*pipeline.stages[:s], joined, *pipeline.stages[s + 2 :]]
                )


def _in_pairs(
    pipeline: Pipeline, join: Callable[[Stage, Stage], Iterator[Stage]], way: int
) -> Pipeline:
    """Returns a pipeline of which every two neighbours of the same chips are joined in one way."""
    stages: list[Stage] = []
    left = list(pipeline.stages)
    while left:
        one, *left = left
        if left and one.chips[0] == left[0].chips[0]:
            joined = next(itertools.islice(join(one, left[0]), way, None), None)
            one, left = (joined, left[1:]) if joined else (one, left)
        stages.append(one)
    return replace(pipeline, stages=tuple(stages))


def _together(plan: Plan, most_parts: int, one: Stage, other: Stage) -> Iterator[Stage]:
    if (one.tp, one.cp) != (other.tp, other.cp):
        return
    layers = one.layers[0], other.layers[1]
    both = replace(one, layers=layers, replicas=one.replicas + other.replicas)
    shares = _even(plan.micro_batch, both.dp)
    if shares:
        yield shared(both, shares)
    chips = {replica.chip for replica in both.replicas}
    if len(chips) > 1 or one.dp != other.dp:
        return
    for tp, cp in ((2 * one.tp, one.cp), (one.tp, 2 * one.cp)):
        if cp > max(most_parts, one.cp):
            continue
        if larger := regrouped(both, plan.model, plan.micro_batch, tp, cp):
            yield larger


def _cut(plan: Plan) -> Iterator[Plan]:
    """A stage becomes two, of half its replicas or of half their ranks."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.layer_count < 2:
                continue
            counts = [st.layer_count for st in pipeline.stages]
            half = stage.layer_count // 2
            counts[s : s + 1] = [stage.layer_count - half, half]
            for halves in _halves(plan, stage):
                stages = [*pipeline.stages[:s], *halves, *pipeline.stages[s + 1 :]]
                yield with_stages(plan, p, with_layers(stages, counts))


def _halves(plan: Plan, stage: Stage) -> Iterator[tuple[Stage, Stage]]:
    middle = stage.dp // 2
    if stage.dp > 1:
        parts = stage.replicas[:middle], stage.replicas[middle:]
        shares = [_even(plan.micro_batch, len(part)) for part in parts]
        if all(shares):
            first, second = (
                shared(replace(stage, replicas=part), own)
                for part, own in zip(parts, shares, strict=True)
                if own
            )
            yield first, second
    for tp, cp in ((stage.tp // 2, stage.cp), (stage.tp, stage.cp // 2)):
        if tp and cp:
            first, second = (_half(plan, stage, tp, cp, part) for part in (0, 1))
            yield first, second


def _half(plan: Plan, stage: Stage, tp: int, cp: int, part: int) -> Stage:
    """Returns a stage with the first or second half of each replica's ranks: of the ranks of each
    tensor-parallel group, or of the groups.
    """

    def half(replica: Replica) -> Replica:
        ranks = (
            rank
            for i, rank in enumerate(replica.ranks)
            if i // stage.tp // cp + i % stage.tp // tp == part
        )
        parts = ways_to_cut(plan.model, cp, tp)[0]
        return replace(replica, ranks=tuple(ranks), token_shares=parts)

    return replace(
        stage,
        sequence_parallel=stage.sequence_parallel and tp > 1,
        replicas=tuple(map(half, stage.replicas)),
    )


def _shares(plan: Plan) -> Iterator[Plan]:
    """Sequences move between replicas of unlike chips."""
    for p, s, stage in places(plan):
        chips: dict[str, list[int]] = {}
        for r, replica in enumerate(stage.replicas):
            chips.setdefault(replica.chip, []).append(r)
        for giver, taker in itertools.permutations(chips, 2):
            for step in STEPS:
                shares = [r.batch_share for r in stage.replicas]
                # each of a type gives, so that all of it stay alike where that goes out even
                given = step * len(chips[giver])
                if given % len(chips[taker]) or min(shares[r] for r in chips[giver]) <= step:
                    given = step
                    shares[max(chips[giver], key=lambda r: (shares[r], -r))] -= step
                    shares[min(chips[taker], key=lambda r: (shares[r], r))] += step
                else:
                    for r in chips[giver]:
                        shares[r] -= step
                    for r in chips[taker]:
                        shares[r] += given // len(chips[taker])
                if min(shares) > 0:
                    yield with_one(plan, p, s, shared(stage, shares))


def _micro_batches(plan: Plan) -> Iterator[Plan]:
    """Micro-batches move between pipelines."""
    for p, q in itertools.permutations(range(len(plan.pipelines)), 2):
        for step in STEPS:
            if plan.pipelines[p].micro_batches > step:
                pipelines = list(plan.pipelines)
                for at, more in ((p, -step), (q, step)):
                    own = pipelines[at]
                    pipelines[at] = replace(own, micro_batches=own.micro_batches + more)
                yield with_pipelines(plan, pipelines)


def _fewer(plan: Plan) -> Iterator[Plan]:
    """A replica, a stage or a pipeline stays idle."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            counts = [st.layer_count for st in pipeline.stages]
            rest = [*pipeline.stages[:s], *pipeline.stages[s + 1 :]]
            if rest:
                layers = counts.pop(s)
                for _ in range(layers):
                    counts[counts.index(min(counts))] += 1
                yield with_stages(plan, p, with_layers(rest, counts))
            for r in range(stage.dp):
                left = stage.replicas[:r] + stage.replicas[r + 1 :]
                if shares := _even(plan.micro_batch, len(left)):
                    yield with_one(plan, p, s, shared(replace(stage, replicas=left), shares))
        if len(plan.pipelines) > 1:
            left_over = [*plan.pipelines[:p], *plan.pipelines[p + 1 :]]
            taken = pipeline.micro_batches
            first = left_over[0]
            left_over[0] = replace(first, micro_batches=first.micro_batches + taken)
            yield with_pipelines(plan, left_over)


def _even(total: int, parts: int) -> list[int]:
    """Returns shares of a micro-batch as equal as can be, or none where some would be empty."""
    if not 0 < parts <= total:
        return []
    share, rest = divmod(total, parts)
    return [share + (i < rest) for i in range(parts)]
