"""The standards: how far each operator may be from the truth, from standards.toml.

A team overrides single numbers with a file of its own, of the same form:

    [classes.softmax.ulps]
    bfloat16 = 2

    [operators.mm]
    importance = "critical"
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
)

from hyperhetero.input import decoded, problems

Importance = Literal["critical", "major", "minor"]
Rule = Literal["equal", "bound", "not compared"]
Keeps = Literal["wide", "result"]
Scale = Literal["terms", "sensitivity"]
DtypeName = Literal["float64", "float32", "float16", "bfloat16"]


class _StandardModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ByDtype(_StandardModel):
    """A number for each dtype; complex dtypes take that of their parts, 8-bit ones bfloat16's."""

    float64: NonNegativeFloat = 0.0  # number for results of float64
    float32: NonNegativeFloat = 0.0  # number for results of float32
    float16: NonNegativeFloat = 0.0  # number for results of float16
    bfloat16: NonNegativeFloat = 0.0  # number for results of bfloat16 and of 8 bits

    def of(self, dtype: torch.dtype) -> float:
        real = dtype.to_real() if dtype.is_complex else dtype
        number: float = getattr(self, _name(real), self.bfloat16)
        return number


class OperatorClass(_StandardModel):
    """What holds for the operators of one class. An element may be off by at most
    ulps x ulp + (roundings + sums x sqrt(n)) x eps x scale, for a sum of n terms.
    """

    about: str  # in words, which operators these are
    operators: tuple[str, ...] = ()  # names of its operators, as shell patterns
    rule: Rule = "bound"  # equal: no error; bound: errors within it; not compared: any values
    ulps: ByDtype = ByDtype()  # allowed error in units in the last place of the result
    roundings: ByDtype = ByDtype()  # allowed roundings of intermediate values, in eps x scale
    sums: NonNegativeFloat = 0.0  # allowed roundings of a sum of n terms, in sqrt(n) x eps x scale
    keeps: Keeps = "wide"  # dtype whose eps counts: wide, at least float32; result, the result's
    scale: Scale = "sensitivity"  # terms: magnitudes added up; sensitivity: how inputs move results
    importance: Importance = "minor"  # which table of [importance] it is held to


class OperatorRule(_StandardModel):
    """What some operators have different from their class."""

    operator_class: str | None = Field(None, alias="class")  # class that it is put in
    ulps: dict[DtypeName, NonNegativeFloat] = {}  # replaces the class's `ulps`, dtype by dtype
    roundings: dict[DtypeName, NonNegativeFloat] = {}  # replaces the class's, dtype by dtype
    sums: NonNegativeFloat | None = None  # replaces the class's `sums`
    keeps: Keeps | None = None  # replaces the class's `keeps`
    scale: Scale | None = None  # replaces the class's `scale`
    importance: Importance | None = None  # replaces the class's `importance`


class Ratios(_StandardModel):
    """The chip's error over the reference GPU's, at most."""

    max_rel: PositiveFloat  # most that the largest relative error may be, over the GPU's
    mean_rel: PositiveFloat  # most that the mean relative error may be, over the GPU's
    rmse: PositiveFloat  # most that the root mean square error may be, over the GPU's
    negligible_share: NonNegativeFloat  # share of the bound below which no ratio counts


class _Flushing(_StandardModel):
    float64: bool  # whether a chip may give 0 for subnormal numbers of float64
    float32: bool  # whether a chip may give 0 for subnormal numbers of float32
    float16: bool  # whether a chip may give 0 for subnormal numbers of float16
    bfloat16: bool  # whether a chip may give 0 for subnormal numbers of bfloat16


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    numbers: OperatorClass
    listed: bool


class Standards(_StandardModel):
    """Every class, and which operators are in it."""

    default_class: str  # class of the operators that no class names
    may_flush_subnormals: _Flushing  # dtypes in which chips may give 0 for subnormal numbers
    importance: dict[Importance, Ratios]  # errors against a reference GPU's, by importance
    classes: dict[str, OperatorClass]  # classes of operators, by name; of two that fit, the first
    operators: dict[str, OperatorRule] = {}  # exceptions, by names such as "var*, std*"
    _known: dict[str, _Found] = PrivateAttr(default_factory=dict)

    def class_of(self, operator: str) -> str:
        """The class of "aten.mm.default"; its in-place, out= and list forms are in it too."""
        return self._find(operator).name

    def numbers_of(self, operator: str) -> OperatorClass:
        """What holds for one operator: its class, with what [operators] has different."""
        return self._find(operator).numbers

    def is_listed(self, operator: str) -> bool:
        """Whether a class names the operator; one that none names has the default class."""
        return self._find(operator).listed

    def smallest(self, dtype: torch.dtype) -> float:
        """Truths below this may come out as 0: chips are free to flush subnormal numbers."""
        real = dtype.to_real() if dtype.is_complex else dtype
        if not getattr(self.may_flush_subnormals, _name(real), False):
            return 0.0
        return float(torch.finfo(real).smallest_normal)

    def _find(self, operator: str) -> _Found:
        found = self._known.get(operator)
        if found is None:
            found = self._known[operator] = self._look_up(operator_names(operator))
        return found

    def _look_up(self, names: Sequence[str]) -> _Found:
        literal = (name for name, each in self.classes.items() if set(names) & set(each.operators))
        matched = (name for name, each in self.classes.items() if _matches(names, each.operators))
        chosen = next(literal, None) or next(matched, None)
        rules = [rule for key, rule in self.operators.items() if _matches(names, _patterns(key))]
        for rule in rules:
            chosen = rule.operator_class or chosen
        numbers = self.classes[chosen or self.default_class]
        for rule in rules:
            own = rule.model_dump(exclude_none=True, exclude={"operator_class"})
            for key in ("ulps", "roundings"):
                own[key] = getattr(numbers, key).model_copy(update=own[key])
            numbers = numbers.model_copy(update=own)
        return _Found(chosen or self.default_class, numbers, chosen is not None)


def operator_names(operator: str) -> list[str]:
    """What patterns may call it: "aten._foreach_add_.List" is also "_foreach_add_" and "add"."""
    parts = operator.split(".")
    name = parts[1] if len(parts) > 1 else operator
    base = name.removeprefix("_foreach_")
    base = base if base.endswith("__") else base.removesuffix("_")
    return list(dict.fromkeys((operator, ".".join(parts[:2]), name, base)))


def _patterns(key: str) -> list[str]:
    """Splits a key of the table [operators], such as "var*, std*", into its patterns."""
    return [part.strip() for part in key.split(",")]


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_standards(path: Path | None = None) -> Standards:
    """The built-in standards, with the numbers of a team's own file in their place.

    Raises:
        ValueError: the file cannot be read or does not fit; one sentence naming file and key.
    """
    built_in = tomllib.loads(files(__package__).joinpath("standards.toml").read_text("utf-8"))
    if path is None:
        return Standards.model_validate(built_in)
    try:
        own = tomllib.loads(decoded(Path(path).read_bytes()))
        _check_names(own, built_in)
        return Standards.model_validate(_merged(built_in, own))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {problems(error)}") from None
    except ValueError as error:  # not TOML, not UTF-8, or an unknown name
        raise ValueError(f"{path}: {error}") from None


def _check_names(own: dict[str, Any], built_in: dict[str, Any]) -> None:
    known = built_in["classes"]
    tables = {key: own.get(key, {}) for key in ("classes", "operators")}
    for key, table in tables.items():
        inner = table.values() if isinstance(table, dict) else [None]
        if not all(isinstance(each, dict) for each in inner):
            raise ValueError(f"{key}: expected a table of tables")
    named = [(f"classes.{name}", name) for name in tables["classes"]]
    for operator, rule in tables["operators"].items():
        named.append((f"operators.{operator}.class", rule.get("class")))
    named.append(("default_class", own.get("default_class")))
    for key, name in named:
        if name is not None and name not in known:
            raise ValueError(f"{key}: unknown class {name!r}, expected one of {', '.join(known)}")


def _merged(base: Any, own: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    return base | {key: _merged(base[key], own[key]) if key in base else own[key] for key in own}
