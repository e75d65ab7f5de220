"""What the tools find, as files: the one format the reports, comparisons and tests read.

Each tool writes `<output>/<tool>-rank<rank>.json`, one `Findings`, atomically. Fields that a tool
does not fill keep their defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ditorch.precision.place import Place
from hyperhetero.input import problems
from hyperhetero.output import write_file


class _ResultModel(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True)


class Where(_ResultModel):
    """A `Place` in a file."""

    rank: int = 0
    step: int = 0
    phase: str = ""
    module: str = ""
    operator: str = ""
    index: int = 0
    function: str = ""
    source: str = ""

    @classmethod
    def of(cls, place: Place) -> Where:
        return cls(**{name: getattr(place, name) for name in cls.model_fields})


class Errors(_ResultModel):
    """Differences from the reference, taken in float64, over all elements compared."""

    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    rmse: float = 0.0
    max_ulp: float = 0.0  # in units in the last place of the tensor's own dtype
    worst_share_of_threshold: float = 0.0  # largest |error| / allowed: above 1 fails
    beyond_threshold: int = 0  # elements
    histogram: list[int] = []  # by decade of relative error: 0, <1e-16, <1e-15, ... <1, >=1


class Element(_ResultModel):
    """One of the worst elements."""

    index: list[int]
    actual: float
    expected: float
    error: float


class OperatorFinding(_ResultModel):
    """Everything about one operator in one dtype (and tensor), over its calls."""

    operator: str  # "aten.mm.default"
    tensor: str = "out"  # which result or written argument
    operator_class: str = ""  # of standards.toml
    dtype: str = ""  # "float32"
    calls: int = 0
    failed_calls: int = 0
    errors: Errors = Errors()
    reference_errors: Errors | None = None  # the reference GPU's own, where a capture has it
    threshold: str = ""  # in words, "|error| <= 1.2e-6 |expected| + 3.1e-7 scale"
    passed: bool = True
    reason: str = ""  # one sentence, when it did not pass
    first_failed: Where | None = None
    worst: list[Element] = []
    worst_where: Where | None = None
    host_calls: int = 0  # of `calls`, computed by the host for lack of a chip kernel


class Overflow(_ResultModel):
    """An operator whose inputs were finite and whose output was not."""

    where: Where
    tensor: str
    kind: Literal["nan", "inf", "out of range"]
    elements: int
    largest_input: float = 0.0


class OperatorTime(_ResultModel):
    """Device time of one operator over its calls."""

    operator: str
    calls: int
    total_s: float
    mean_s: float
    max_s: float
    host_calls: int = 0  # of `calls`, computed by the host for lack of a chip kernel
    host_s: float = 0.0  # of `total_s`


class Observed(_ResultModel):
    """The calls of one operator in one module and phase."""

    first: Where
    calls: int
    dtypes: list[str] = []


class LossCurve(_ResultModel):
    """A training run's losses, one a step; the H2 paper's equation 1 compares two."""

    name: str
    losses: list[float]


class Findings(_ResultModel):
    """One tool's findings on one rank."""

    version: Literal[1] = 1
    tool: str  # "compare", "replay", "depart", "overflow", "time", "isolate", "loss"
    rank: int = 0
    device: str = ""  # "emuchip:0"
    chip: str = ""  # "vendor B, B-MINI"
    reference: str = ""  # "cpu float64", or what the other run ran on
    steps: int = 0
    passed: bool = True
    summary: str = ""  # one sentence
    operators: list[OperatorFinding] = []
    first_bad: Where | None = None
    first_bad_reason: str = ""
    overflows: list[Overflow] = []
    times: list[OperatorTime] = []
    observed: list[Observed] = []
    losses: list[LossCurve] = []
    mean_relative_error: float | None = None  # of losses, H2 equation 1; the bar is 0.015
    guilty: list[str] = []  # operators named by isolate
    guilty_modules: list[str] = []  # where they are called, as far as isolate can tell
    fallbacks: dict[str, int] = {}  # runs on the host by operator name
    notes: list[str] = []


def findings_path(output: Path, tool: str, rank: int) -> Path:
    return output / f"{tool}-rank{rank}.json"


def write_findings(findings: Findings, output: Path) -> Path:
    """Writes atomically; returns the file's path."""
    path = findings_path(output, findings.tool, findings.rank)
    write_atomically(path, findings.model_dump_json(indent=1).encode())
    return path


def read_findings(path: Path) -> Findings:
    """Raises ValueError, one sentence naming the file and what is wrong."""
    try:
        return Findings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {problems(error)}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """All of `content`, or the file as it was: never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
