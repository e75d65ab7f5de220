"""How the optimizer moves: AdamW's constants, the learning rate's schedule, clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST = 1e36  # with room for float32 to multiply it by what a step has


class HyperparameterError(ValueError):
    """A setting that cannot be; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """How the optimizer moves; part of a checkpoint, so that a run resumes on the same path."""

    learning_rate: float = 1e-3
    warmup_steps: int = 10
    decay_steps: int = 100  # the cosine ends here
    minimum_ratio: float = 0.1  # of learning_rate, where the cosine ends
    gradient_clip: float = 1.0  # the largest global norm; 0 means no clipping
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    most_skipped: int = 10  # steps in a row, because of a loss or norm that is not finite
    spike_factor: float = (
        10.0  # times the median of loss or norm, from which a step is unusual; 0: none
    )
    skip_spikes: bool = False  # or only warn of them

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to the minimum; steps count from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        span = max(1, self.decay_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.minimum_ratio + (1 - self.minimum_ratio) * cosine)

    def validate(self) -> None:
        """Raises HyperparameterError, one sentence."""
        for name, fits, expected in (
            (
                "learning_rate",
                0 < self.learning_rate <= LARGEST,
                f"a positive number up to {LARGEST:g}",
            ),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("decay_steps", self.decay_steps >= 1, "at least 1"),
            (
                "gradient_clip",
                0 <= self.gradient_clip <= LARGEST,
                f"0 or a positive number up to {LARGEST:g}",
            ),
            ("weight_decay", 0 <= self.weight_decay <= 100, "0 to 100"),
            ("most_skipped", self.most_skipped >= 1, "at least 1"),
            (
                "spike_factor",
                self.spike_factor == 0 or 1 < self.spike_factor < math.inf,
                "0 or more than 1",
            ),
        ):
            if not fits:
                raise HyperparameterError(f"{name} is {getattr(self, name)}; expected {expected}")
