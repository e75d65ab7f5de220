"""Dynamic loss scaling: gradients of a float16 model are scaled up, so that small ones survive.

The scale is halved by a step whose gradients overflow, which is skipped, and doubled after many
that do not (Mixed Precision Training, section 3.2).
"""

from __future__ import annotations

GROWTH_STEPS = 2000
SMALLEST = 2.0**-14
LARGEST = 2.0**24


class LossScale:
    """The factor of a float16 model's loss.

    It is a power of two, so that scaling and unscaling change no bit of what does not overflow.
    """

    def __init__(self, scale: float = 2.0**16, good_steps: int = 0) -> None:
        self.scale, self.good_steps = scale, good_steps  # since it last changed

    def overflowed(self) -> bool:
        """Halves the scale; returns False if it is as small as it gets, and so not to blame."""
        scale, self.good_steps = self.scale, 0
        self.scale = max(scale / 2, SMALLEST)
        return self.scale < scale

    def went_well(self) -> None:
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.scale, self.good_steps = min(self.scale * 2, LARGEST), 0
