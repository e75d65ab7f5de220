"""A few figures of chips, fitted to several measurements at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy

from heteropp.description.chips import ChipSpec
from heteropp.description.measured import MeasuredRuns
from heteropp.profiling.measured import predict_times


@dataclass(frozen=True)
class Parameter:
    """A figure of a chip that a fit may choose, between two bounds, on a scale of logarithms."""

    name: str
    low: float
    high: float
    get: Callable[[ChipSpec], float]
    put: Callable[[ChipSpec, float], ChipSpec]


@dataclass(frozen=True)
class Fit:
    chips: dict[str, ChipSpec]
    parameters: dict[str, dict[str, float]]  # by chip
    residual: float  # median relative error of the points that were fitted


def _efficiency() -> Parameter:
    return Parameter(
        "efficiency",
        0.02,
        1.0,
        lambda chip: chip.compute.efficiency,
        lambda chip, value: replace(chip, compute=replace(chip.compute, efficiency=value)),
    )


PARAMETERS = (_efficiency(),)


def fit(file: MeasuredRuns, chips: dict[str, ChipSpec]) -> Fit:
    """Returns the chips with the figures that explain the file's points for fitting best."""
    names = sorted(chips)
    start = numpy.array([math.log(p.get(chips[name])) for name in names for p in PARAMETERS])
    low = numpy.log([p.low for _ in names for p in PARAMETERS])
    high = numpy.log([p.high for _ in names for p in PARAMETERS])

    def at(values: numpy.ndarray) -> dict[str, ChipSpec]:
        result, left = dict(chips), iter(values)
        for name in names:
            for parameter in PARAMETERS:
                result[name] = parameter.put(result[name], math.exp(next(left)))
        return result

    def errors(values: numpy.ndarray) -> numpy.ndarray:
        points = predict_times(file, at(values), fitted_alone=True)
        return numpy.array([math.log(p.predicted / p.measured) for p in points])

    values = least_squares(errors, start, low, high)
    left_out = numpy.abs(errors(values))
    return Fit(
        at(values),
        {name: {p.name: p.get(chip) for p in PARAMETERS} for name, chip in at(values).items()},
        statistics.median(left_out),
    )


def least_squares(
    errors: Callable[[numpy.ndarray], numpy.ndarray],
    start: Sequence[float] | numpy.ndarray,
    low: numpy.ndarray,
    high: numpy.ndarray,
    steps: int = 30,
) -> numpy.ndarray:
    """Returns where the sum of squared errors is least within bounds (Levenberg-Marquardt)."""
    values = numpy.clip(numpy.array(start, float), low, high)
    now, damping = errors(values), 1e-2
    for _ in range(steps):
        slopes = numpy.empty((len(now), len(values)))
        for i in range(len(values)):
            step = 1e-3 if values[i] + 1e-3 <= high[i] else -1e-3
            moved = values.copy()
            moved[i] += step
            slopes[:, i] = (errors(moved) - now) / step
        better = False
        for _ in range(8):
            normal = slopes.T @ slopes
            normal += damping * numpy.diag(numpy.diag(normal) + 1e-9)
            tried = numpy.clip(values - numpy.linalg.solve(normal, slopes.T @ now), low, high)
            found = errors(tried)
            if found @ found < now @ now:
                better = now @ now - found @ found > 1e-7 * (now @ now)
                values, now, damping = tried, found, damping / 5
                break
            damping *= 5
        if not better:
            break
    return values
