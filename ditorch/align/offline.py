"""Two runs that need not have shared a machine: their captures, or their losses."""

from __future__ import annotations

from pathlib import Path

from ditorch.precision.loss import BAR, mean_relative_error, read_losses
from ditorch.precision.results import Findings, LossCurve


def compare_offline(reference: Path, other: Path, standards: Path | None) -> Findings:
    """Judges `other` by `reference`; both are captures, or both have losses.

    Raises ValueError: one of them cannot be read, or they cannot be compared.
    """
    for path in (reference, other):
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or directory")
    if _is_capture(reference) and _is_capture(other):
        from ditorch.precision.captures.depart import depart
        from ditorch.precision.standards import load_standards

        return depart(reference, other, standards=load_standards(standards))
    right, losses = read_losses(reference), read_losses(other)
    try:
        error = mean_relative_error(right, losses)
    except ValueError as problem:
        raise ValueError(f"{reference} and {other}: {problem}") from None
    return Findings(
        tool="loss",
        chip=str(other),
        reference=str(reference),
        steps=len(right),
        passed=error < BAR,
        summary=f"losses: mean relative error {error:.3%}, has to be below {BAR:.1%}",
        losses=[
            LossCurve(name=str(reference), losses=right),
            LossCurve(name=str(other), losses=losses),
        ],
        mean_relative_error=error,
    )


def _is_capture(path: Path) -> bool:
    return any(each.is_dir() for each in path.glob("rank*"))
