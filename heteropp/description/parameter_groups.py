"""Parameters with settings of their own, by patterns of names: "embedding*:learning_rate=0.1x"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

EXPECTED = "PATTERN:SETTING=VALUE, such as 'embedding*:learning_rate=0.1x,weight_decay=0'"


class HyperparameterError(ValueError):
    """A setting that cannot be; the message is one sentence."""


@dataclass(frozen=True)
class ParameterGroup:
    pattern: str  # of names of parameters in the whole model, as a shell matches files
    learning_rate_factor: float = 1.0
    weight_decay: float | None = None  # None: as if it were in no group

    def fits(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """Returns a parameter's group: of several that fit, the first counts."""
    return next((group for group in groups if group.fits(name)), ParameterGroup("*"))


def parse_group(text: str) -> ParameterGroup:
    """Reads a group, its settings separated by commas. Raises HyperparameterError."""
    pattern, _, settings = text.partition(":")
    if not pattern or not settings:
        raise HyperparameterError(
            f"group {text!r} has no pattern or no settings; expected {EXPECTED}"
        )
    found: dict[str, float] = {}
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        if name not in ("learning_rate", "weight_decay"):
            raise HyperparameterError(
                f"group {text} has setting {name!r}; expected learning_rate or weight_decay"
            )
        if name in found:
            raise HyperparameterError(f"group {text} has setting {name} twice")
        found[name] = _rate(text, value) if name == "learning_rate" else _decay(text, value)
    return ParameterGroup(pattern, found.get("learning_rate", 1.0), found.get("weight_decay"))


def _rate(text: str, value: str) -> float:
    factor = _number(value[:-1]) if value.endswith("x") else math.nan
    if not 0 <= factor < math.inf:
        raise HyperparameterError(
            f"group {text} has learning_rate {value!r}; expected a multiple of the others', "
            "such as 0.1x"
        )
    return factor


def _decay(text: str, value: str) -> float:
    decay = _number(value)
    if not 0 <= decay <= 100:
        raise HyperparameterError(f"group {text} has weight_decay {value!r}; expected 0 to 100")
    return decay


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
