"""How planners may cut sequences, for context parallelism, and spread experts over ranks."""

from __future__ import annotations

from functools import lru_cache

from heteropp.cost.token_shares import token_shares
from heteropp.cost.tracing.scores import kernel_takes_parts
from heteropp.description.profile import chip_profile
from heteropp.models.spec import ModelSpec
from heteropp.search.planner import Request

WAYS = 3  # to cut a sequence into so many parts, at most
BY_WORK, EVEN = 0, WAYS - 1  # the first and the last of them
SHORTEST_SLICE = 1024  # tokens, where the request does not say how many slices there may be
USUAL_SLICES = 16  # of a sequence, at most, there


def numbers_of_parts(request: Request, most: int) -> tuple[int, ...]:
    """Returns the powers of two, from 1 on, into which stages may cut sequences.

    most: parts that the request lets them have. Only 1 is left where the model, its kernel or a
    measured profile has to do with whole sequences.
    """
    most = min(most, request.cluster.world_size)
    if most > 1 and (
        request.model.context_parallel_problem() is not None or _takes_whole_ones(request)
    ):
        most = 1
    return tuple(1 << n for n in range(most.bit_length()))


def numbers_of_slices(request: Request, most: int | None) -> tuple[int, ...]:
    """Returns the powers of two, from 1 on, into which pipelines may cut sequences to run the parts
    in turn. most: slices that the request lets them have; None: as many as are usual.
    """
    length = request.model.sequence_length
    most = min(USUAL_SLICES, length // SHORTEST_SLICE) if most is None else min(most, length)
    if most > 1 and (
        request.model.token_slices_problem() is not None or _takes_whole_ones(request)
    ):
        most = 1
    return tuple(1 << n for n in range(max(1, most).bit_length()))


def _takes_whole_ones(request: Request) -> bool:
    """Whether the model's kernel or a measured profile has to do with whole sequences."""
    return any(
        chip_profile(request.cluster, name) for name in request.cluster.chip_names()
    ) or not kernel_takes_parts(request.model)


def most_expert_ranks(request: Request, most: int) -> int:
    """Returns the most ranks over which the experts of a layer may lie; 1: each rank has them all.

    most: ranks that the request lets them have.
    """
    model = request.model
    if most == 1 or model.expert_parallel_problem() is not None:
        return 1
    return max(1, min(most, model.expert_count, request.cluster.world_size))


@lru_cache(maxsize=1024)
def ways_to_cut(model: ModelSpec, cp: int, tp: int) -> tuple[tuple[int, ...] | None, ...]:
    """Returns ways to cut a sequence over so many tensor-parallel groups of chips that are alike.

    By the first each has as much work, and the first group most tokens; by the last all have as
    many tokens, and about as much memory. Not cutting is the one way for one group. Raises
    ModelError where sequences cannot be cut so.
    """
    if cp == 1:
        return (None,)
    speeds = (1.0,) * cp
    by_work = token_shares(model, speeds, tp)
    fewest = -(-model.sequence_length // (cp * tp)) * tp
    between = (fewest + max(by_work)) // 2
    return tuple(
        dict.fromkeys([by_work, *(token_shares(model, speeds, tp, n) for n in (between, fewest))])
    )
