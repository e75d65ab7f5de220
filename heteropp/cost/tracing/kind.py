"""What a traced stage depends on, beside its model and its number of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from heteropp.description.hyperparameters import OptimizerName

# of a step, each traced by itself
PIECES = ("forward", "backward_input", "backward_weight", "norm", "update", "orthogonal")


@dataclass(frozen=True)
class StageKind:
    block: str  # the kind of its blocks
    first: bool  # it embeds
    last: bool  # it ends in the loss
    tp: int
    sequences: int  # of a micro-batch
    sequence_parallel: bool = False
    selective_recompute: bool = False
    whole_backward: bool = False  # none of it is put off; it is then all in backward_input
    optimizer: OptimizerName = "adamw"
    token_shares: tuple[int, ...] | None = None  # of a replica with context parallelism
    cp_index: int = 0  # which of them it has
