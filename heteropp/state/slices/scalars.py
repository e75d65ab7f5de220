"""What a rank holds besides slices of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """What a step depends on besides tensors and settings."""

    updates: int = 0  # of the optimizer: completed steps but for those that were skipped
    losses: tuple[float, ...] = ()  # the guard's, of the newest steps
    gradient_norms: tuple[float, ...] = ()
    skipped_in_a_row: int = 0
    loss_scale: float | None = None  # of float16
    good_steps: int = 0  # since the loss scale changed
