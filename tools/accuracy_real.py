"""Predicted against measured steps of real machines, as published.

Each file of heteropp/description/presets/measured names a small part of its runs; chips are fitted
to that part, and all other runs are predicted.
"""

from __future__ import annotations

import json as json_
import os
import platform
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from heteropp.description.files import write_text
from heteropp.description.measured import MeasuredRuns, read_chips, read_measured
from heteropp.description.presets import measured_names
from heteropp.profiling.fitting import fit
from heteropp.profiling.measured import Point, predict_memory, predict_times


def show(output: Path | None, json: bool) -> None:
    """Prints what `real` finds, and writes it where `output` says."""
    result = real()
    if output:
        write_text(output, json_.dumps(result, indent=1) + "\n")
    print(json_.dumps(result, indent=1) if json else table(result))


def real(names: list[str] | None = None) -> dict:
    """Fits and predicts the named files, or all. Returns the evidence that tools print."""
    rows, files = [], []
    for name in names or measured_names():
        file = read_measured(name)
        began = time.perf_counter()
        found = fit(file, read_chips(name, file))
        seconds = time.perf_counter() - began
        points = predict_times(file, found.chips)
        memory = predict_memory(file, found.chips)
        rows += _rows(file, points, memory, found.cross_validated)
        files.append(
            {
                "name": name,
                "split": file.split,
                "lacks": file.lacks,
                "fit_s": seconds,
                "parameters": found.parameters,
                "points": [{**asdict(p), "error": p.error} for p in (*points, *memory)],
            }
        )
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {"tool": "accuracy-real", "machine": machine, "rows": rows, "files": files}


def _rows(
    file: MeasuredRuns, points: list[Point], memory: list[Point], cross_validated: float
) -> list[dict]:
    bars = file.bars
    judged = [p for p in points if p.what == "step" and not p.fit and not p.doubt]
    errors = [100 * abs(p.error) for p in judged]
    rows = [
        _line(
            f"{file.name}: median error of {len(errors)} steps not fitted",
            statistics.median(errors),
            bars and bars.step_median,
        ),
        _line(f"{file.name}: worst error of them", max(errors), bars and bars.step_worst),
        _line(
            f"{file.name}: median error of what was fitted, cross-validated",
            100 * cross_validated,
            None,
        ),
    ]
    if memory:
        worst = max(100 * abs(p.error) for p in memory if not p.doubt)
        rows.append(
            _line(f"{file.name}: worst error of peak memory", worst, bars and bars.memory_worst)
        )
    return rows


def _line(name: str, ours: float, bar: float | None) -> dict:
    empty = {"peer": None, "peer_name": None, "ratio": None}
    return {
        "name": name,
        "unit": "%",
        "ours": ours,
        **empty,
        "bar": None if bar is None else 100 * bar,
        "better": "lower",
    }


def table(result: dict) -> str:
    """The evidence, point by point, as a person reads it."""
    lines = []
    for file in result["files"]:
        lines.append(f"{file['name']} (fitted in {file['fit_s']:.1f} s): {file['split'].strip()}")
        if file["lacks"]:
            lines.append(f"  its data lack: {file['lacks'].strip()}")
        for chip, values in file["parameters"].items():
            shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            lines.append(f"  {chip}: {shown}")
        for point in file["points"]:
            note = " fitted" if point["fit"] else " not judged" if point["doubt"] else ""
            lines.append(
                f"  {point['name']:48s} {point['what']:8s} {point['measured']:<11.5g} "
                f"{point['predicted']:<11.5g} {point['error']:+7.1%}{note}"
            )
    for row in result["rows"]:
        bar = "" if row["bar"] is None else f" (bar {row['bar']:g})"
        lines.append(f"{row['name']}: {row['ours']:.1f} %{bar}")
    return "\n".join(lines)
