"""What a plan's stage must be by itself: its replicas, their shares, and what the model allows."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING

from heteropp.models.spec import ModelSpec

if TYPE_CHECKING:
    from heteropp.description.plan import Replica, Stage


class PlanError(ValueError):
    """A plan that cannot run; the message is one sentence that says where and why."""


def validate_stage(model: ModelSpec, micro_batch: int, stage: Stage, where: str) -> None:
    """Checks one stage for itself; where: its place in the plan. Raises PlanError."""
    if not stage.replicas:
        raise PlanError(f"{where}.replicas is empty; expected at least one")
    for r, replica in enumerate(stage.replicas):
        here = f"{where}.replicas[{r}]"
        if not replica.ranks:
            raise PlanError(f"{here}.ranks is empty; expected at least one")
        _validate_tokens(model, replica, here)
        if replica.cp != stage.cp:
            raise PlanError(
                f"{here} has context-parallel degree {replica.cp} and replicas[0] {stage.cp}; "
                "the replicas of a stage have one"
            )
        if len(replica.ranks) != stage.cp * stage.tp:
            raise PlanError(
                f"{here} has {len(replica.ranks)} ranks and replicas[0] "
                f"{len(stage.replicas[0].ranks)}; "
                "the replicas of a stage have one tensor-parallel degree"
            )
        if list(replica.ranks) != sorted(replica.ranks):  # as process groups number them
            raise PlanError(f"{here}.ranks is {list(replica.ranks)}; expected ascending ranks")
        if replica.batch_share < 1:
            raise PlanError(f"{here}.batch_share is {replica.batch_share}; expected at least 1")
        for chip in replica.chips:
            if not chip.isprintable():
                raise PlanError(f"{here} has chip {json.dumps(chip)}; expected the name of one")
    if stage.cp > 1 and (problem := model.context_parallel_problem()):
        raise PlanError(f"{where}.replicas[0].token_shares: {problem}")
    if stage.cp > 1 and stage.offload:
        raise PlanError(f"{where}: offload does not go with token_shares in this release")
    _validate_experts(model, stage, f"{where}.expert_shares")
    if micro_batch % stage.micro_batch:
        raise PlanError(
            f"{where}: the batch shares sum to {stage.micro_batch}, which does not divide "
            f"micro_batch {micro_batch}"
        )
    if stage.sequence_parallel and stage.tp == 1:
        raise PlanError(
            f"{where}.sequence_parallel cuts rows over a replica's ranks; this stage has one each"
        )
    if stage.selective_recompute and stage.recompute:
        raise PlanError(f"{where}: recompute does already what selective_recompute asks for")
    if stage.selective_recompute and (problem := model.selective_recompute_problem()):
        raise PlanError(f"{where}.selective_recompute: {problem}")
    if stage.sequence_parallel and (problem := model.sequence_parallel_problem()):
        raise PlanError(f"{where}.sequence_parallel: {problem}")
    if problem := model.tp_problem(stage.tp):
        raise PlanError(f"{where}: {problem}")


def _validate_tokens(model: ModelSpec, replica: Replica, where: str) -> None:
    shares, chips = replica.token_shares, replica.group_chips
    if shares is None:
        if chips is not None:
            raise PlanError(f"{where}.group_chips is for a replica with token_shares; it has none")
        return
    if chips is not None and (len(chips) != len(shares) or chips[0] != replica.chip):
        raise PlanError(
            f"{where}.group_chips is {list(chips)}; expected one for each of its {len(shares)} "
            f"token_shares, the first of them its chip, {replica.chip}"
        )
    length, here = model.sequence_length, f"{where}.token_shares"
    if len(shares) < 2:
        raise PlanError(f"{here} is {list(shares)}; expected at least two, or none at all")
    if min(shares) < 1 or sum(shares) != length:
        raise PlanError(
            f"{here} is {list(shares)}; expected numbers of tokens above 0 that sum to the model's "
            f"sequence_length {length}"
        )
    tp, rest = divmod(len(replica.ranks), len(shares))
    if rest:
        raise PlanError(
            f"{where} has {len(replica.ranks)} ranks for {len(shares)} token_shares; expected a "
            "multiple of them, a tensor-parallel group for each"
        )
    if uneven := [share for share in shares if share % tp]:
        raise PlanError(
            f"{here}: tensor-parallel degree {tp} does not divide a share of {uneven[0]} tokens"
        )


def _validate_experts(model: ModelSpec, stage: Stage, where: str) -> None:
    shares, capacity = stage.expert_shares, stage.expert_capacity
    if capacity is not None and (shares is None or not 1 <= capacity < inf):
        raise PlanError(
            f"{where.replace('shares', 'capacity')} is {capacity}; expected a number from 1 on, in "
            "a stage with expert_shares"
        )
    if shares is None:
        return
    if problem := model.expert_parallel_problem():
        raise PlanError(f"{where}: {problem}")
    if len(shares) < 2 or stage.copies % len(shares):
        raise PlanError(
            f"{where} is {list(shares)}; expected two shares or more, in a number that divides the "
            f"stage's {stage.copies} tensor-parallel groups"
        )
    if min(shares) < 1 or sum(shares) != model.expert_count:
        raise PlanError(
            f"{where} is {list(shares)}; expected numbers of experts above 0 that sum to the "
            f"model's {model.expert_count}"
        )
