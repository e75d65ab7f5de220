"""Plans that cut sequences, on whatever chips there are.

A long sequence in parts costs about what as many short ones do, so that they are made of plans for
those: replicas that had short sequences each then have parts of a long one, by their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from heteropp.cost.token_shares import token_shares
from heteropp.description.plan import Plan, Replica, Stage
from heteropp.models.spec import ModelSpec
from heteropp.search.balance import deal
from heteropp.search.skeletons import Power, Ranks

# from the fastest to the one that needs least memory on the rank that needs most: whether parts
# have as many tokens each, and not as much work, and whether all stages recompute
WAYS = ((False, False), (True, False), (True, True))


def of_shorter(plan: Plan, factor: int) -> Plan | None:
    """Returns a plan for so many times as many sequences, that many times as short.

    Its pipelines are those of the plan: what is made of it takes their ministages alone. None where
    the length is no whole number of tokens.
    """
    length, rest = divmod(plan.model.sequence_length, factor)
    if rest:
        return None
    model = replace(plan.model, sequence_length=length)
    return replace(plan, model=model, global_batch=factor * plan.global_batch)


def in_parts(plan: Plan, model: ModelSpec, factor: int, power: Power) -> Iterator[Plan]:
    """Yields plans for sequences of a model, made of one for sequences so many times as short.

    Those that follow the first need less memory. power: of a tensor-parallel group. Yields none
    where a micro-batch has no whole number of sequences, no stage would cut them, or one into more
    than twice as many parts. Raises ModelError where sequences cannot be cut so.
    """
    sequences, rest = divmod(plan.micro_batch, factor)
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    if rest or not 1 < max(_parts(stage.dp, sequences, factor) for stage in stages) <= 2 * factor:
        return
    for even, recompute in WAYS:
        pipelines = []
        for pipeline in plan.pipelines:
            longer = (
                replace(
                    stage,
                    replicas=tuple(_replicas(stage, model, sequences, factor, power, even)),
                    recompute=stage.recompute or recompute,
                )
                for stage in pipeline.stages
            )
            pipelines.append(replace(pipeline, stages=tuple(longer)))
        yield replace(
            plan,
            model=model,
            global_batch=plan.global_batch // factor,
            micro_batch=sequences,
            pipelines=tuple(pipelines),
        )


def _replicas(
    stage: Stage, model: ModelSpec, sequences: int, factor: int, power: Power, even: bool
) -> Iterator[Replica]:
    """Yields replicas that are each several of a stage's, which are tensor-parallel groups.

    They take `sequences` together. even: parts have as many tokens each.
    """
    chips = {replica.ranks: replica.chip for replica in stage.replicas}
    groups = sorted(chips)
    cp = _parts(len(groups), sequences, factor)
    together = [groups[first : first + cp] for first in range(0, len(groups), cp)]
    powers = [sum(map(power, own)) for own in together]
    shares = deal(sequences, [lambda n, own=own: n / own for own in powers])  # type: ignore[misc]
    for own, share in zip(together, shares, strict=True):
        own_chips = tuple(chips[ranks] for ranks in own)
        yield Replica(
            ranks=tuple(chain(*own)),
            chip=own_chips[0],
            batch_share=share,
            token_shares=_token_shares(own, model, power, even) if cp > 1 else None,
            group_chips=own_chips if len(set(own_chips)) > 1 else None,
        )


def _parts(groups: int, sequences: int, factor: int) -> int:
    """Returns over how many of so many groups each sequence is cut: `factor` or a few more, or over
    all that there are.
    """
    return next(
        groups // n
        for n in range(min(groups, sequences), 0, -1)
        if n == 1 or (groups % n == 0 and groups // n >= factor)
    )


def _token_shares(
    groups: Sequence[Ranks], model: ModelSpec, power: Power, even: bool
) -> tuple[int, ...]:
    count, tp = len(groups), len(groups[0])
    if not even:
        return token_shares(model, list(map(power, groups)), tp)
    fewest = -(-model.sequence_length // (count * tp)) * tp
    return token_shares(model, [1.0] * count, tp, fewest)
