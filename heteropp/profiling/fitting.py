"""A few figures of chips, fitted to several measurements at once."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy

from heteropp.description.chips import ChipSpec, Collectives, Kernels, load_chip
from heteropp.description.files import FileError, read_text, write_text
from heteropp.description.measured import MeasuredRuns
from heteropp.profiling.measured import predict_times

# how far, on a scale of logarithms, a figure is taken to be from its usual value
KNOWN, GUESSED, OVERHEAD = 0.2, 0.7, 1.0  # rates in the chip's file, other rates, and latencies
ERROR = 0.03  # the same of measurements; those much further off are taken to be mistaken


@dataclass(frozen=True)
class Figure:
    """A figure of a chip file that a fit may choose."""

    section: str
    name: str
    low: float
    high: float


PARAMETERS = (
    Figure("compute", "efficiency", 0.02, 1.0),
    Figure("compute", "launch_s", 1e-7, 1e-3),
    Figure("kernels", "half_side", 1.0, 4096.0),
    Figure("kernels", "causal_attention_efficiency", 0.05, 4.0),
    Figure("kernels", "causal_attention_backward_efficiency", 0.05, 4.0),
    Figure("kernels", "bandwidth_share", 0.1, 4.0),
    Figure("kernels", "host_s", 1e-7, 1e-2),
    Figure("kernels", "micro_batch_s", 1e-6, 0.1),
    Figure("collectives", "latency_s", 1e-6, 1e-2),
    Figure("collectives", "bytes_per_s", 1e6, 1e13),
    Figure("links", "nic_bytes_per_s", 1e6, 1e12),
    Figure("links", "nic_latency_s", 1e-6, 1e-2),
)
HOSTS = (1.0, 8.0)  # times the usual seconds an operator, from which a fit starts
STEPS = 15  # of the solver, at most
FOLDS = 4  # of the cross-validation
FILLED = ("kernels", "collectives")  # sections that a fit fills whole
# of kernels, where the chip's file does not say and the measurements tell nothing
USUAL = Kernels(
    half_side=100.0,
    causal_attention_efficiency=0.5,
    causal_attention_backward_efficiency=0.5,
    bandwidth_share=0.8,
    host_s=1e-5,
    micro_batch_s=1e-3,
)
HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")  # of a chip file's section
GROUPS = {2: "pair_bytes_per_s", 4: "four_bytes_per_s"}  # may be joined by links of their own


@dataclass(frozen=True)
class Fit:
    chips: dict[str, ChipSpec]
    parameters: dict[str, dict[str, float]]  # by chip
    cross_validated: float  # median relative error of points that the fit was not shown in turn


def fit(file: MeasuredRuns, chips: dict[str, ChipSpec]) -> Fit:
    """Returns the chips with the figures that explain the file's points for fitting best.

    A figure of which they say little stays near its usual value.
    """
    problem = _Problem(file, chips)
    every = range(problem.points)
    # where the host keeps up, how slow it is does not show: it is tried from a slower one, too
    host = numpy.array([p.name == "host_s" for _, p in problem.keys])
    tried = [
        problem.solve(every, problem.usual + host * math.log(factor), STEPS) for factor in HOSTS
    ]
    values = min(tried, key=lambda found: problem.cost(found, every))
    left_out: list[float] = []
    for fold in range(min(FOLDS, problem.points)):
        shown = [i for i in every if i % FOLDS != fold]
        found = problem.logarithms(problem.solve(shown, values, STEPS // 3))
        left_out += [abs(math.expm1(found[i])) for i in every if i % FOLDS == fold]
    return Fit(problem.at(values), problem.figures(values), statistics.median(left_out))


class _Problem:
    """The points for fitting of a file, as errors of the logarithms of what a fit may choose."""

    def __init__(self, file: MeasuredRuns, chips: dict[str, ChipSpec]) -> None:
        self.file = file
        self.start = {name: begun(chip) for name, chip in chips.items()}
        self.keys = [
            (name, parameter)
            for name in sorted(chips)
            for parameter in (*PARAMETERS, *_of_groups(file, name))
        ]
        self.usual = numpy.log([_usual(self.start[name], p) for name, p in self.keys])
        self.doubt = numpy.array([_doubt(chips[name], p) for name, p in self.keys])
        self.low = numpy.log([p.low for _, p in self.keys])
        self.high = numpy.log([p.high for _, p in self.keys])
        self.points = len(self.logarithms(self.usual))

    def at(self, values: numpy.ndarray) -> dict[str, ChipSpec]:
        """Returns the chips that have these figures."""
        result = dict(self.start)
        sections: dict[tuple[str, str], dict[str, float]] = {}
        for (name, p), value in zip(self.keys, values, strict=True):
            sections.setdefault((name, p.section), {})[p.name] = math.exp(value)
        for (name, section), figures in sections.items():
            old = getattr(result[name], section)
            result[name] = replace(result[name], **{section: replace(old, **figures)})
        return result

    def figures(self, values: numpy.ndarray) -> dict[str, dict[str, float]]:
        result: dict[str, dict[str, float]] = {}
        for (name, p), value in zip(self.keys, values, strict=True):
            result.setdefault(name, {})[p.name] = math.exp(value)
        return result

    def logarithms(self, values: numpy.ndarray) -> list[float]:
        """Returns, of each point, the logarithm of what is predicted over what was measured."""
        points = predict_times(self.file, self.at(values), fitted_alone=True)
        return [math.log(p.predicted / p.measured) for p in points]

    def errors(self, values: numpy.ndarray, shown: Sequence[int]) -> numpy.ndarray:
        found = self.logarithms(values)
        away = (values - self.usual) / self.doubt
        return numpy.array([*(bent(found[i] / ERROR) for i in shown), *away])

    def cost(self, values: numpy.ndarray, shown: Sequence[int]) -> float:
        return float(numpy.sum(self.errors(values, shown) ** 2))

    def solve(self, shown: Sequence[int], start: numpy.ndarray, steps: int) -> numpy.ndarray:
        return least_squares(
            lambda values: self.errors(values, shown), start, self.low, self.high, steps
        )


def write_fitted(chip: ChipSpec, output: Path, said: str) -> None:
    """Writes a chip's own file with the figures that were fitted, and all else as it is there.

    said: of those, a sentence for the file. Raises FileError, also where the file has no line for
    one of the figures.
    """
    given = load_chip(chip.path)
    changed = {
        (p.section, p.name): new
        for p in PARAMETERS
        if p.section not in FILLED
        and (new := _figure(chip, p.section, p.name)) != _figure(given, p.section, p.name)
    }
    section, kept, comments = "", list[str](), list[str]()
    for line in read_text(chip.path).splitlines():
        if header := HEADER.match(line):
            section = header[1]
            if section not in FILLED:
                kept += comments  # of this section, though they stand in one that is filled
            comments = []
        if section in FILLED:
            while kept and (not kept[-1] or kept[-1].startswith("#")):
                kept.pop()  # what was said of the section
            comments = [*comments, line] if not line or line.startswith("#") else []
            continue
        key, _, rest = line.partition("=")
        if (figure := (section, key.strip())) in changed:
            comment = f"  #{rest.partition('#')[2]}" if "#" in rest else ""
            line = f"{key}= {changed.pop(figure):.4g}{comment}"
        kept.append(line)
    for section, name in changed:
        raise FileError(
            f"{chip.path}: expected {name} on a line of its own under [{section}], where what was "
            "fitted can be written"
        )
    kept += ["", *(f"# {line}" for line in textwrap.wrap(said, 98))]
    for section in FILLED:
        if getattr(chip, section) is None:
            continue
        figures = asdict(getattr(chip, section)).items()
        kept += [f"[{section}]"]
        kept += [f"{name} = {value:.4g}" for name, value in figures if value is not None] + [""]
    write_text(output, "\n".join(kept[:-1]) + "\n")


def _figure(chip: ChipSpec, section: str, name: str) -> float:
    figure: float = getattr(getattr(chip, section), name)
    return figure


def begun(chip: ChipSpec) -> ChipSpec:
    """Returns a chip that has the sections which a fit fills, with usual figures where it has not
    its own, and one efficiency for all dtypes.
    """
    chip = chip.with_efficiency(chip.compute.efficiency)
    return replace(
        chip,
        kernels=chip.kernels or USUAL,
        collectives=chip.collectives or Collectives(2e-5, chip.links.intra_node_bytes_per_s),
    )


def _usual(chip: ChipSpec, parameter: Figure) -> float:
    found = getattr(getattr(chip, parameter.section), parameter.name)
    assert chip.collectives is not None
    return chip.collectives.bytes_per_s if found is None else found


def _doubt(chip: ChipSpec, parameter: Figure) -> float:
    if parameter.name in ("launch_s", "host_s", "micro_batch_s", "latency_s", "nic_latency_s"):
        return OVERHEAD
    measured = parameter.section in FILLED
    return KNOWN if measured and getattr(chip, parameter.section) is not None else GUESSED


def bent(error: float) -> float:
    """Returns an error whose square grows as the error itself where that is large."""
    return math.copysign(math.sqrt(2 * (math.sqrt(1 + error * error) - 1)), error)


def _of_groups(file: MeasuredRuns, chip: str) -> list[Figure]:
    """Returns a bandwidth for each size of group, but the largest, that a chip's points have."""
    sizes = {block.tp for block in file.blocks if block.chip == chip and block.fit}
    sizes |= {r.tp for r in file.runs if r.fit and any(chip in stage for stage in r.replicas)}
    sizes -= {1, max(sizes, default=1)}
    return [
        Figure("collectives", GROUPS[size], 1e6, 1e13) for size in sorted(sizes & GROUPS.keys())
    ]


def least_squares(
    errors: Callable[[numpy.ndarray], numpy.ndarray],
    start: numpy.ndarray,
    low: numpy.ndarray,
    high: numpy.ndarray,
    steps: int,
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
                better = now @ now - found @ found > 1e-4 * (now @ now)
                values, now, damping = tried, found, damping / 5
                break
            damping *= 5
        if not better:
            break
    return values
