"""What a pipeline must be whose micro-batches run slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heteropp.description.schedules import SLICING, Schedule
from heteropp.description.stage_checks import PlanError
from heteropp.models.spec import ModelSpec

if TYPE_CHECKING:
    from heteropp.description.plan import Pipeline


def validate_slices(
    model: ModelSpec, micro_batch: int, schedule: Schedule, pipeline: Pipeline, where: str
) -> None:
    """Checks a pipeline's token_slices, if it has some; where: its place. Raises PlanError."""
    if pipeline.token_slices is None:
        return
    slices, here = pipeline.token_slices, f"{where}.token_slices"
    if problem := model.token_slices_problem():
        raise PlanError(f"{here}: {problem}")
    if schedule not in SLICING:
        raise PlanError(
            f"{here}: schedule {schedule} runs no slices; expected {' or '.join(SLICING)}"
        )
    if len(slices) < 2:
        raise PlanError(f"{here} is {list(slices)}; expected at least two, or none at all")
    if min(slices) < 1 or sum(slices) != model.sequence_length:
        raise PlanError(
            f"{here} is {list(slices)}; expected numbers of tokens above 0 that sum to the model's "
            f"sequence_length {model.sequence_length}"
        )
    for s, stage in enumerate(pipeline.stages):
        if uneven := [tokens for tokens in slices if tokens % stage.tp]:
            raise PlanError(
                f"{here}: tensor-parallel degree {stage.tp} of stages[{s}] does not divide a slice "
                f"of {uneven[0]} tokens"
            )
        for name, is_there in (
            ("token_shares", stage.cp > 1),
            ("expert_shares", stage.ep > 1),
            ("ministages", stage.ministages > 1),
            ("offload", stage.offload),
        ):
            if is_there:
                raise PlanError(f"{here} does not go with {name}, which stages[{s}] has")
        if stage.micro_batch != micro_batch:
            raise PlanError(
                f"{here}: the batch shares of stages[{s}] sum to {stage.micro_batch}; expected all "
                f"of micro_batch {micro_batch}, as each slice is of all its sequences"
            )
