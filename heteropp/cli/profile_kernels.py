"""heteropp-profile --kernels: chip files that say how far a chip's kernels stay below its peaks."""

from __future__ import annotations

import json as json_
import statistics
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from heteropp.api.errors import InputError
from heteropp.cli.profile_blocks import ChipProcess
from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.files import make_folder
from heteropp.models.spec import ModelSpec
from heteropp.profiling.fitting import write_fitted
from heteropp.profiling.operators import DTYPES, MeasuredOperator, fit_kernels, operators_of
from hyperhetero.progress import Progress

ROUNDING = 0.02  # by which a product may seem to go beyond the peak


@dataclass(frozen=True)
class MeasuredChip:
    """A chip with the figures that fit its operators, and these."""

    spec: ChipSpec
    operators: tuple[MeasuredOperator, ...]

    @property
    def said(self) -> str:
        """What was fitted, and how far off the figures are where nothing was."""
        errors: dict[str, list[float]] = {}
        for each in self.operators:
            if not each.operator.fit:
                errors.setdefault(each.operator.kind, []).append(abs(each.error(self.spec)))
        fitted = sum(each.operator.fit for each in self.operators)
        parts = (
            f"{kind} {statistics.median(found):.1%} (worst {max(found):.1%})"
            for kind, found in errors.items()
        )
        return (
            f"Fitted to {fitted} operators in {self.operators[0].operator.dtype} by "
            f"heteropp-profile --kernels on {date.today()}, as is launch_s. "
            f"Median error of others: "
            f"{', '.join(parts)}."
        )


def measure_kernels(
    cluster: Cluster, model: ModelSpec, chips: list[str], folder: Path, json: bool
) -> None:
    """Measures one chip of each type, writes their files into a folder, and says what was found.

    Raises InputError, also where a chip is faster than its file says, FileError and
    ChipProcessError.
    """
    if model.dtype not in DTYPES:
        raise InputError(f"--kernels measures {', '.join(DTYPES)}; the model's are {model.dtype}")
    make_folder(folder)
    found = {}
    for name in chips:
        spec = load_chip(cluster.chip(cluster.ranks_of(name)[0]).path)
        path = folder / f"{Path(name).stem}.toml"
        found[name] = _measured(name, spec, model)
        write_fitted(found[name].spec, path, found[name].said)
        if not json:
            _show(name, found[name])
            print(f"{path} is {spec.path.name} with these figures; a cluster file may name it")
    if json:
        print(json_.dumps({name: _as_json(chip) for name, chip in found.items()}, indent=2))


def _measured(name: str, spec: ChipSpec, model: ModelSpec) -> MeasuredChip:
    operators = operators_of(spec, model.dtype)
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn()
    measured = []
    with (
        ChipProcess(str(spec.path), spec.chip_type, model) as process,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        for operator in progress.track(operators, description=f"chip {name}"):
            answer = process.ask({"operator": asdict(operator)})
            if "measured" in answer:  # and not too large for the chip's memory
                measured.append(MeasuredOperator(operator=operator, seconds=answer["measured"]))
        host_s = process.ask({"host": None})["measured"]
    _check_peak(spec, measured)
    return MeasuredChip(fit_kernels(spec, measured, host_s), tuple(measured))


def _check_peak(spec: ChipSpec, measured: list[MeasuredOperator]) -> None:
    """Raises InputError where products are faster than the chip's file says is possible."""
    products = [m for m in measured if m.operator.kind == "product"]
    dtype = products[0].operator.dtype
    peak, found = spec.peak_flops(dtype), max(m.operator.flops / m.seconds for m in products)
    if found > (1 + ROUNDING) * peak:
        raise InputError(
            f"{spec.path}: compute.{dtype}_flops is {peak:.4g}, and products reach {found:.4g} "
            "FLOP/s; expected the chip's peak"
        )


def _show(name: str, chip: MeasuredChip) -> None:
    """Prints a table of the operators, in microseconds; those that were not fitted are new."""
    table = Table(title=f"chip {name}, us", box=None, padding=(0, 1, 0, 0))
    for heading in ("operator", "sides"):
        table.add_column(heading, no_wrap=True)
    for heading in ("measured", "of peak", "by the fit", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in chip.operators:
        operator = each.operator
        share = operator.flops / chip.spec.peak_flops(operator.dtype) / each.seconds
        table.add_row(
            operator.kind,
            "x".join(map(str, operator.sides)),
            f"{each.seconds * 1e6:.1f}",
            f"{share:.1%}" if operator.flops else "",
            f"{operator.predicted_s(chip.spec) * 1e6:.1f}",
            f"{each.error(chip.spec):+.1%}",
            "" if operator.fit else "new",
        )
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(chip.said, soft_wrap=True)


def _as_json(chip: MeasuredChip) -> dict:
    return {
        "launch_s": chip.spec.compute.launch_s,
        "kernels": asdict(chip.spec.kernels) if chip.spec.kernels else None,
        "operators": [
            {**asdict(m.operator), "seconds": m.seconds, "error": m.error(chip.spec)}
            for m in chip.operators
        ],
    }
