"""heteropp-calibrate --runs: a few figures of chips from several measurements at once."""

from __future__ import annotations

import json as json_
import statistics
from dataclasses import asdict
from pathlib import Path

from heteropp.api.errors import InputError
from heteropp.description.files import make_folder
from heteropp.description.measured import read_chips, read_measured
from hyperhetero.progress import Status


def calibrate_several(runs: Path, output: Path | None, json: bool) -> None:
    """Fits the file's chips, says how well, and writes their files.

    Raises InputError and FileError.
    """
    file = read_measured(runs)
    if not any([*(block.fit for block in file.blocks), *(run.fit for run in file.runs)]):
        raise InputError(f"{runs} marks nothing with fit = true; expected what is to be fitted")
    chips = read_chips(runs, file)
    from heteropp.profiling.fitting import fit, write_fitted
    from heteropp.profiling.measured import predict_times

    if output:
        make_folder(output)
    with Status(f"fitting {', '.join(chips)}"):
        found = fit(file, chips)
    points = predict_times(file, found.chips)
    if output:
        for name, chip in found.chips.items():
            said = (
                f"Fitted to measured runs {file.name} by heteropp-calibrate, as are [compute] and "
                "NICs."
            )
            write_fitted(chip, output / f"{Path(name).stem}.toml", said)
    if json:
        shown = {
            "parameters": found.parameters,
            "cross_validated_error": found.cross_validated,
            "points": [{**asdict(point), "error": point.error} for point in points],
        }
        print(json_.dumps(shown, indent=2))
        return
    for name, figures in found.parameters.items():
        print(f"chip {name}")
        for figure, value in figures.items():
            print(f"  {figure:30s} {value:.4g}")
    print(f"{'point':48s} {'what':8s} {'measured':>11s} {'predicted':>11s}   error")
    for point in points:
        note = "  fitted" if point.fit else f"  ({point.doubt})" if point.doubt else ""
        print(
            f"{point.name[:48]:48s} {point.what:8s} {point.measured:11.5g} {point.predicted:11.5g} "
            f"{point.error:+7.1%}{note}"
        )
    others = [abs(p.error) for p in points if not p.fit and not p.doubt]
    print(f"cross-validated error of what was fitted: {found.cross_validated:.1%} (median)")
    if others:
        print(
            f"error of the {len(others)} others: {statistics.median(others):.1%} (median), "
            f"{max(others):.1%} (worst)"
        )
    if output:
        print(f"{output} holds the chips' files with these figures")
