"""What a conformance run found, and its file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from ditorch.precision.results import write_atomically

Status = Literal["passed", "failed", "unsupported"]

COMPUTED_BY = ("chip", "host", "both", "neither")
"""Who computed a sample: the chip's kernels, host fallbacks, both, or neither (views, memory)."""


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    unsupported: int = 0

    @property
    def supported(self) -> int:
        return self.passed + self.failed

    def count(self, status: Status) -> None:
        setattr(self, status, getattr(self, status) + 1)

    def add(self, other: Tally) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.unsupported += other.unsupported


@dataclass(frozen=True)
class Outcome:
    """One sample of an operator: one input, in one dtype, through one variant."""

    dtype: str
    variant: str
    sample: int
    status: Status
    reason: str = ""  # why it did not pass
    computed_by: str = "neither"


@dataclass
class OperatorResult:
    """All samples of one operator of PyTorch's operator database."""

    name: str
    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)  # by dtype, by variant
    problems: list[Outcome] = field(default_factory=list)  # the samples that did not pass
    computed_by: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)  # runs of the chip's own kernels
    fallbacks: dict[str, int] = field(default_factory=dict)  # runs of host fallbacks
    refused_by_cpu: int = 0  # samples that the CPU itself refuses: not counted anywhere else
    elapsed_s: float = 0.0

    def record(self, outcome: Outcome) -> None:
        by_variant = self.tallies.setdefault(outcome.dtype, {})
        by_variant.setdefault(outcome.variant, Tally()).count(outcome.status)
        if outcome.status != "passed":
            self.problems.append(outcome)
        if outcome.status != "unsupported":
            self.computed_by[outcome.computed_by] = self.computed_by.get(outcome.computed_by, 0) + 1

    @property
    def tally(self) -> Tally:
        total = Tally()
        for by_variant in self.tallies.values():
            for tally in by_variant.values():
                total.add(tally)
        return total


@dataclass(frozen=True)
class CheckResult:
    """One check of the runtime part."""

    group: str
    name: str
    status: Status
    reason: str = ""


@dataclass(frozen=True)
class Settings:
    """What was asked for; two runs with equal settings check the same samples."""

    operators: list[str]  # glob patterns; empty: all
    dtypes: list[str]  # empty: all
    samples_per_dtype: int
    seed: int


@dataclass
class Conformance:
    vendor: str
    chip_type: str
    device: str
    torch_version: str
    command: str
    settings: Settings
    elapsed_s: float = 0.0
    left_out: int = 0  # operators and checks that had no time
    checks: list[CheckResult] = field(default_factory=list)
    operators: list[OperatorResult] = field(default_factory=list)

    @property
    def tally(self) -> Tally:
        """Samples of operators; the runtime part is counted on its own."""
        total = Tally()
        for operator in self.operators:
            total.add(operator.tally)
        return total

    @property
    def check_tally(self) -> Tally:
        total = Tally()
        for check in self.checks:
            total.count(check.status)
        return total

    @property
    def covered(self) -> list[OperatorResult]:
        """The operators with at least one supported sample."""
        return [operator for operator in self.operators if operator.tally.supported]

    @property
    def pass_rate(self) -> float:
        """The fraction of the operators' supported samples that passed; 1 if none is supported."""
        return self.tally.passed / self.tally.supported if self.tally.supported else 1.0

    def problems(self, status: Status) -> Iterator[tuple[str, Outcome]]:
        """(operator, sample) of every sample with that status."""
        for operator in self.operators:
            for outcome in operator.problems:
                if outcome.status == status:
                    yield operator.name, outcome


_FILE: TypeAdapter[Conformance] = TypeAdapter(Conformance)


def write_conformance(conformance: Conformance, path: Path) -> None:
    write_atomically(path, _FILE.dump_json(conformance, indent=1) + b"\n")


def read_conformance(path: Path) -> Conformance:
    """Raises ValueError naming the file if it is not a conformance result; OSError."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a conformance result: {first}") from None
