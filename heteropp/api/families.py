"""What is known of a model, or of all families: sizes, and how they compare with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from heteropp.api.errors import InputError
from heteropp.api.given import AnyModel, the_model
from heteropp.api.proof import FAMILY, LARGEST_GROUP, proved
from heteropp.models.families import families, spec_of
from heteropp.models.spec import ModelError, ModelSpec

if TYPE_CHECKING:
    from heteropp.models.hugging_face.check import Check
    from heteropp.models.hugging_face.model import HuggingFaceModel

Progress = Callable[[str], None]  # is told what comes next


@dataclass(frozen=True)
class Degree:
    """What one degree of tensor parallelism comes to."""

    tp: int
    error: float | None = None  # the largest of loss and gradients, relative; None: no number
    parameter: str = ""  # what it is of
    problem: str = ""  # why plans cannot have the degree, or what is wrong
    failed: bool = False
    sequence_parallel: bool = False

    @staticmethod
    def of(check: Check) -> Degree:
        """Returns what a check has found."""
        tp, own = check.tp, check.sequence_parallel
        if check.problem:
            return Degree(tp, None, "", check.problem, not check.is_refused, own)
        problem = "" if check.passed else check.explain()
        error = check.error if math.isfinite(check.error) else None
        return Degree(tp, error, check.worst, problem, not check.passed, own)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of a model or of a family."""

    family: str  # transformers' model_type, or that of our own
    is_own: bool = False  # its modules are ours: our tests hold them against transformers
    is_sequence_parallel: bool = False  # of its own modules, whether rows can be cut
    problem: str = ""  # why no model of it can be made, in a clause
    is_stack: bool = True  # whether it is layers between a table and a head, as far as is known
    kinds: dict[str, int] = field(default_factory=dict)  # how many layers of each
    has_experts: bool = False
    parameters: int = 0
    active_parameters: int = 0  # which one token uses
    degrees: tuple[Degree, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)  # of the family's default config

    @property
    def passed(self) -> bool:
        """Whether a model can be made, and every degree that plans can have is right."""
        return not self.problem and not any(degree.failed for degree in self.degrees)


def check_model(
    model: AnyModel,
    tp: int = 2,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Holds a model's family, made small, against transformers.

    model: as heteropp.plan takes it. tp: the largest degree of tensor parallelism to try; powers
    of two up to it are. Raises FileError or InputError.
    """
    if not 1 <= tp <= LARGEST_GROUP:
        raise InputError(f"tp is {tp}; expected 1 to {LARGEST_GROUP}")
    spec = the_model(model, trust_remote_code=trust_remote_code)
    return _report(spec, tp, progress or (lambda _: None))


def family_names() -> list[str]:
    """Returns every family that transformers has a causal language model of. Raises InputError."""
    from heteropp.models.hugging_face.config import check_release

    try:
        check_release()
    except ModelError as error:
        raise InputError(str(error)) from None
    from heteropp.models.hugging_face.usual import families as known

    return list(known())


def check_family(name: str, tp: int = 2) -> Report:
    """Holds the usual config of a family, made small, against transformers. Raises InputError."""
    if name not in family_names():
        raise InputError(f"transformers has no causal language model of model_type {name!r}")
    return _usual(name, tp)


def _usual(name: str, tp: int) -> Report:
    from heteropp.models.hugging_face.family import NoStackError
    from heteropp.models.hugging_face.reading import read
    from heteropp.models.hugging_face.usual import usual_config

    if own := _own().get(name):
        rows = own.sequence_parallel_problem() is None
        return Report(family=name, is_own=True, is_sequence_parallel=rows)
    try:
        values, changes = usual_config(name)
        report = _report(read(values, name), tp, lambda _: None)
    except (ModelError, InputError) as error:
        is_stack = not any(isinstance(each, NoStackError) for each in (error, error.__cause__))
        return Report(family=name, problem=str(error), is_stack=is_stack)
    return Report(**{**vars(report), "family": name, "changes": changes})


def _own() -> dict[str, type[ModelSpec]]:
    """Returns the specs of which we have modules of our own, by model_type."""
    found: dict[str, type[ModelSpec]] = {}
    for spec in map(spec_of, families()):
        if (format_ := spec.hugging_face()) is not None:
            found |= dict.fromkeys(format_.model_types, spec)
    return found


def _report(model: ModelSpec, tp: int, progress: Progress) -> Report:
    order = [model.block_kind(i) for i in range(model.layers)]
    kinds = {kind: order.count(kind) for kind in dict.fromkeys(order)}
    if model.family != FAMILY:
        total = model.elements()
        return Report(
            family=model.family, is_own=True, kinds=kinds, parameters=total, active_parameters=total
        )
    return _of_transformers(model, kinds, tp, progress)  # type: ignore[arg-type]


def _of_transformers(
    model: HuggingFaceModel, kinds: dict[str, int], tp: int, progress: Progress
) -> Report:
    degrees = []
    for degree in (1 << bit for bit in range(tp.bit_length())):
        progress(f"tensor-parallel degree {degree}")
        if problem := model.tp_problem(degree):
            degrees.append(Degree(degree, problem=problem))
            continue
        degrees.append(Degree.of(proved(model, degree)))
        if degree == 1:
            continue
        if problem := model.sequence_parallel_problem():
            degrees.append(Degree(degree, problem=problem, sequence_parallel=True))
            continue
        degrees.append(Degree.of(proved(model, degree, sequence_parallel=True)))
    return Report(
        family=str(model.config.values()["model_type"]),
        kinds=kinds,
        has_experts=any("experts" in kind for kind in kinds),
        parameters=model.elements(),
        active_parameters=model.active_elements(),
        degrees=tuple(degrees),
    )
