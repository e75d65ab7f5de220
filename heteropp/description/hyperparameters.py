"""How which optimizer moves: constants, the learning rate's schedule, groups, clipping."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from heteropp.description.parameter_groups import (
    HyperparameterError,
    ParameterGroup,
    group_of,
    parse_group,
)
from hyperhetero.input import listed

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

    from heteropp.layout.parameter import Parameter

__all__ = ["HyperparameterError", "Hyperparameters", "LearningRateSchedule", "OptimizerName"]

LARGEST = 1e36  # with room for float32 to multiply it by what a step has

OptimizerName = Literal["adamw", "muon"]  # Muon's other parameters than hidden matrices have AdamW
LearningRateSchedule = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """How the optimizer moves; part of a checkpoint, so that a run resumes on the same path."""

    optimizer: OptimizerName = "adamw"  # the plan's, whose memory and time depend on it
    learning_rate: float = 1e-3
    learning_rate_schedule: LearningRateSchedule = "cosine"  # after the warm-up
    warmup_steps: int = 10
    decay_steps: int = 100  # the learning rate's decay ends here
    cooldown_steps: int | None = None  # the last of them, in which wsd decays; None: a tenth
    minimum_ratio: float = 0.1  # of learning_rate, where the decay ends
    gradient_clip: float = 1.0  # the largest global norm; 0 means no clipping
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95  # Muon's
    weight_decay: float = 0.1
    # how far a step moves the bias of each expert's router; 0: not at all (DeepSeek-V3: 0.001)
    expert_bias_update_rate: float = 0.0
    groups: tuple[str, ...] = ()  # of parameters with settings of their own; see parse_group
    # norms and biases decay unless the model says otherwise, as in runs of earlier releases
    vectors_decay: bool = False
    most_skipped: int = 10  # steps in a row, because of a loss or norm that is not finite
    spike_factor: float = (
        10.0  # times the median of loss or norm, from which a step is unusual; 0: none
    )
    skip_spikes: bool = False  # or only warn of them

    @property
    def cooldown(self) -> int:
        """The steps in which schedule wsd decays, after the stable ones (MiniCPM, section 4)."""
        if self.cooldown_steps is None:
            return max(1, self.decay_steps // 10)
        return self.cooldown_steps

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then the schedule down to the minimum; steps count from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        begin = self.warmup_steps
        if self.learning_rate_schedule == "wsd":
            begin = max(begin, self.decay_steps - self.cooldown)
        progress = min(1.0, max(0, step - begin) / max(1, self.decay_steps - begin))
        if self.learning_rate_schedule == "constant":
            left = 1.0
        elif self.learning_rate_schedule == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            left = 1 - progress
        return self.learning_rate * (self.minimum_ratio + (1 - self.minimum_ratio) * left)

    def of(self, parameter: Parameter, name: str) -> tuple[float, float]:
        """Returns what the learning rate is multiplied by for a parameter, and its weight decay.

        name: the parameter's in the whole model. Norms and biases have no weight decay unless
        their group says otherwise.
        """
        group = group_of(name, self._groups)
        if group.weight_decay is not None:
            return group.learning_rate_factor, group.weight_decay
        decays = parameter.decays and (self.vectors_decay or len(parameter.shape) > 1)
        return group.learning_rate_factor, self.weight_decay if decays else 0.0

    @cached_property
    def _groups(self) -> tuple[ParameterGroup, ...]:
        return tuple(parse_group(text) for text in self.groups)

    def check_groups(self, names: Collection[str]) -> None:
        """Raises HyperparameterError for a group of none of a model's parameters that train."""
        for text, group in zip(self.groups, self._groups, strict=True):
            if not any(map(group.fits, names)):
                raise HyperparameterError(
                    f"group {text} fits no parameter that trains, whose names are "
                    f"{_outlined(names)}"
                )

    def validate(self) -> None:
        """Raises HyperparameterError, one sentence that names all that is wrong."""
        optimizers, schedules = get_args(OptimizerName), get_args(LearningRateSchedule)
        found = []
        for name, fits, expected in (
            ("optimizer", self.optimizer in optimizers, f"one of {', '.join(optimizers)}"),
            (
                "learning_rate",
                0 < self.learning_rate <= LARGEST,
                f"a positive number up to {LARGEST:g}",
            ),
            (
                "learning_rate_schedule",
                self.learning_rate_schedule in schedules,
                f"one of {', '.join(schedules)}",
            ),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("decay_steps", self.decay_steps >= 1, "at least 1"),
            (
                "cooldown_steps",
                self.cooldown_steps is None or 1 <= self.cooldown_steps <= self.decay_steps,
                f"1 to the {self.decay_steps} of decay_steps",
            ),
            ("minimum_ratio", 0 <= self.minimum_ratio <= 1, "0 to 1"),
            (
                "gradient_clip",
                0 <= self.gradient_clip <= LARGEST,
                f"0 or a positive number up to {LARGEST:g}",
            ),
            ("weight_decay", 0 <= self.weight_decay <= 100, "0 to 100"),
            (
                "expert_bias_update_rate",
                0 <= self.expert_bias_update_rate <= 1,
                "0 to 1",
            ),
            ("most_skipped", self.most_skipped >= 1, "at least 1"),
            (
                "spike_factor",
                self.spike_factor == 0 or 1 < self.spike_factor < math.inf,
                "0 or more than 1",
            ),
        ):
            if not fits:
                found.append(f"{name} is {getattr(self, name)}; expected {expected}")
        if found:
            raise HyperparameterError(listed(found))
        if self.cooldown_steps is not None and self.learning_rate_schedule != "wsd":
            raise HyperparameterError(
                f"cooldown_steps is {self.cooldown_steps}, which schedule wsd alone has; "
                f"learning_rate_schedule is {self.learning_rate_schedule}"
            )
        for text in self.groups:
            parse_group(text)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Hyperparameters], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Reads a file of an earlier release, which does not say that its norms decay, as such."""
        from pydantic_core import core_schema

        def read(value: Any) -> Any:
            return {"vectors_decay": True, **value} if isinstance(value, dict) else value

        return core_schema.no_info_before_validator_function(read, handler(source))


def _outlined(names: Collection[str]) -> str:
    """Returns some of the names: those of blocks once."""
    blocks = [name for name in names if name.startswith("layers.")]
    first = [name for name in blocks if name.split(".")[1] == blocks[0].split(".")[1]]
    others = [name for name in names if not name.startswith("layers.")]
    return ", ".join([*first, *others])
