"""Where to cut sequences for context parallelism, so that each part is done in the same time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from heteropp.cost.tracing import cache as trace_cache
from heteropp.cost.tracing.scores import keeps_no_scores
from heteropp.models.spec import ModelError, ModelSpec

POINTS = 16  # lengths of which a model's FLOPs are asked; between them they are all but linear
HALVINGS = 60  # of the time that the slowest part may take


def token_shares(
    model: ModelSpec, speeds: Sequence[float], tp: int = 1, most: int | None = None
) -> tuple[int, ...]:
    """Returns how many tokens of a sequence each of some ranks takes, in the sequence's order.

    A later token sees more keys, so that of ranks of one speed the last takes fewest. No other
    contiguous parts keep the slowest rank for less time, by a model's FLOPs.

    speeds: of the ranks, relative to each other; tp: the tensor-parallel degree, of which shares
    are multiples; most: tokens that a rank has memory for. Raises ModelError where one of these, or
    the number of ranks, does not go with the sequence, and for a model whose sequences cannot be
    cut.
    """
    if problem := model.context_parallel_problem():
        raise ModelError(problem)
    length, parts = model.sequence_length, len(speeds)
    if parts < 2:
        raise ModelError(f"speeds has {parts} ranks; expected at least two, to cut a sequence over")
    if min(speeds) <= 0 or length % tp or length < parts * tp:
        raise ModelError(
            f"a sequence of {length} tokens cannot be cut into {parts} parts for speeds "
            f"{', '.join(map(str, speeds))}, each a multiple of {tp} tokens"
        )
    longest = (length if most is None else most) // tp * tp
    if longest * parts < length:
        raise ModelError(f"a sequence of {length} tokens has no {parts} parts of at most {most}")
    flops = _part_flops(model)

    def shares_within(time_s: float) -> list[int]:
        """Returns as many tokens as each rank does in a time; the last takes the rest."""
        shares: list[int] = []
        for rank, speed in enumerate(speeds[:-1]):
            first, others = sum(shares), parts - 1 - rank
            fewest = max(tp, length - first - others * longest)
            counts = range(fewest, min(longest, length - first - others * tp) + 1, tp)
            done = bisect_left(counts, speed * time_s, key=lambda n: flops(first, first + n))
            shares.append(counts[max(0, done - 1)])
        return [*shares, length - sum(shares)]

    def slowest_s(shares: Sequence[int]) -> float:
        firsts = [sum(shares[:rank]) for rank in range(parts)]
        found = zip(firsts, shares, speeds, strict=True)
        return max(flops(first, first + n) / speed for first, n, speed in found)

    low_s, high_s = 0.0, flops(0, length) / min(speeds)
    best = shares_within(high_s)
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        found = shares_within(middle_s)
        best = min(best, found, key=slowest_s)
        low_s, high_s = (low_s, middle_s) if slowest_s(found) <= middle_s else (middle_s, high_s)
    return tuple(best)


@lru_cache(maxsize=64)
def _part_flops(model: ModelSpec) -> Callable[[int, int], float]:
    """Returns the FLOPs of tokens [first, last) of a sequence, as a function of the two."""
    ends = sorted({max(1, model.sequence_length * i // POINTS) for i in range(1, POINTS + 1)})

    def counted() -> list[float]:
        return [replace(model, sequence_length=end).flops_per_token() for end in ends]

    # a family of transformers' is counted with torch, which takes seconds
    blocks = dict(model.block_counts([(0, model.layers)]))
    known = trace_cache.get(model, f"FLOPs a token up to {ends} of {blocks}", counted, list)

    def each(length: int) -> float:
        """Returns those of a token of so long a sequence."""
        i = min(max(bisect_left(ends, length), 1), len(ends) - 1) if len(ends) > 1 else 0
        if not i:
            return known[0]
        slope = (known[i] - known[i - 1]) / (ends[i] - ends[i - 1])
        return known[i] + (length - ends[i]) * slope

    if keeps_no_scores(model):
        return lambda first, last: last * each(last) - first * each(first)
    return lambda first, last: (last - first) * each(last)  # scores that a mask hides count, too
