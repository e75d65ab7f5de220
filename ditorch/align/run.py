"""One script on a reference and on each chip: do the losses agree, and which operators do not?

The losses come from a run with nothing else open (H2 paper, section 3.1.2, equation 1 and table 1),
the tools from a second run of few steps, so that neither disturbs the other.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ditorch.align.offline import compare_offline
from ditorch.chips import chip_names
from ditorch.precision.isolation.runs import Run, RunError, Runs
from ditorch.precision.loss import BAR, mean_relative_error
from ditorch.precision.results import Findings, LossCurve, read_findings, write_findings
from ditorch.precision.standards import load_standards
from ditorch.vendors import VENDORS, library

EXAMPLE = Path(__file__).with_name("example.py")

TOOLS = ("compare", "overflow", "time", "capture")
"""Those that look at operators and change nothing."""

Progress = Callable[[str, int], None]
"""Is told of each run by name, and how many steps it has taken."""

_POLL_S = 0.5


@dataclass(frozen=True)
class Alignment:
    """How far a chip's losses are from the reference's."""

    chip: str  # as it was asked for, "b"
    mean_relative_error: float | None  # None: it has too few losses
    passed: bool
    sentence: str


def run_and_align(
    script: Path,
    args: Sequence[str],
    *,
    chips: Sequence[str],
    reference: str,
    steps: int,
    tools: Sequence[str],
    tool_steps: int,
    output: Path,
    standards: Path | None = None,
    deadline_s: float = 3600.0,
    progress: Progress = lambda run, steps: None,
) -> list[Alignment]:
    """Runs the script on the reference, then on each chip; findings lie in `output/<chip>`.

    Args:
        chips: presets or files of emulated chips ("b", "mine.toml"), or vendors' names ("cuda").
        tools: of `TOOLS`, each with its own defaults; captures are compared with the reference's.
        tool_steps: steps of the run in which the tools look on.
        deadline_s: of one run.

    Raises:
        ValueError: a chip, tool or script that does not exist, standards that cannot be read, or
            a script without losses on the reference.
    """
    _check(chips, reference, tools)
    load_standards(standards)  # what is wrong with them is to be said before hours of runs
    with Runs(script, args, deadline_s=deadline_s) as runs:

        def run(chip: str, folder: Path, stop_after: int, **tables: dict[str, Any]) -> Run:
            what = f"{folder.relative_to(output)}"
            with _watched(folder, lambda taken: progress(what, taken)):
                return runs.run(chip, folder, stop_after=stop_after, **tables)

        def look(chip: str, folder: Path, tools: Sequence[str]) -> str:
            """Runs the script with the tools; why it failed, or nothing."""
            captures = folder / "capture"
            if "capture" in tools:
                shutil.rmtree(captures, ignore_errors=True)
            tables = {name: {"output": str(folder.resolve())} for name in tools}
            if "compare" in tools and standards:
                tables["compare"]["standards"] = str(standards.resolve())
            if "capture" in tools:
                tables["capture"] = {"output": str(captures.resolve()), "tensors": "all"}
            try:
                ended = run(chip, folder, tool_steps, **tables)
            except RunError as error:
                return str(error)
            return f"the script failed with tools: {ended.last_words()}" if ended.exit_code else ""

        try:
            right = run(reference, output / "reference", steps).losses()
        except RunError as error:
            raise ValueError(f"the reference {reference}: {error}") from None
        captured = output / "reference" / "tools"
        if "capture" in tools and (failure := look(reference, captured, ["capture"])):
            raise ValueError(f"the reference {reference}: {failure}")
        alignments = []
        for chip in chips:
            folder = folder_of(chip, output)
            shutil.rmtree(folder / "tools", ignore_errors=True)  # of another time
            alignment, findings = _align(
                chip, folder, partial(run, chip, folder, steps), reference, right
            )
            write_findings(findings, folder)
            alignments.append(alignment)
            if tools and (failure := look(chip, folder / "tools", tools)):
                failed = Findings(tool="run", chip=findings.chip, passed=False, summary=failure)
                write_findings(failed, folder)
            elif "capture" in tools:
                departed = compare_offline(
                    captured / "capture", folder / "tools" / "capture", standards
                )
                departed.chip = findings.chip
                write_findings(departed, folder)
    return alignments


def _align(
    chip: str, folder: Path, run: Callable[[], Run], reference: str, right: list[float]
) -> tuple[Alignment, Findings]:
    """Judges the losses of a chip's run, which writes to `folder`."""
    losses: list[float] = []
    error, failure = None, ""
    try:
        ended = run()
        failure = f"the script failed: {ended.last_words()}" if ended.exit_code else ""
        losses = ended.losses()
        error = mean_relative_error(right, losses)
        sentence = f"losses: mean relative error {error:.3%}, has to be below {BAR:.1%}"
    except (RunError, ValueError) as problem:
        sentence = str(problem)
    sentence = failure or sentence
    passed = error is not None and error < BAR and not failure
    found = _own_findings(folder)
    findings = Findings(
        tool="align",
        device=found.device if found else "",
        chip=found.chip if found else chip,
        reference=reference,
        steps=len(losses),
        passed=passed,
        summary=sentence,
        losses=[
            LossCurve(name=f"reference: {reference}", losses=right),
            LossCurve(name=found.chip if found else chip, losses=losses),
        ],
        mean_relative_error=error,
    )
    return Alignment(chip, error, passed, sentence), findings


def _own_findings(folder: Path) -> Findings | None:
    """What the loss tool of rank 0 wrote; it names the chip."""
    try:
        return read_findings(folder / "loss-rank0.json")
    except ValueError:
        return None


@contextmanager
def _watched(folder: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Tells how many losses the run that goes on in `folder` has, again and again."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            progress(_losses_so_far(folder))

    watcher = threading.Thread(target=watch, daemon=True)
    progress(0)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(_losses_so_far(folder))


def _losses_so_far(folder: Path) -> int:
    found = _own_findings(folder)
    return len(found.losses[0].losses) if found and found.losses else 0


def check_chip(chip: str) -> None:
    """Raises ValueError: there is no such chip."""
    if chip == library.VENDOR.name and (found := library.look()).state != "found":
        raise ValueError(f"the chip {chip}: {found.why}")
    vendors = [vendor.name for vendor in VENDORS]
    if chip not in (*vendors, *chip_names()) and not Path(chip).is_file():
        raise ValueError(
            f"there is no chip {chip!r}, expected one of {', '.join(chip_names())}, the path "
            f"of a chip file, or a vendor: {', '.join(vendors)}"
        )


def _check(chips: Sequence[str], reference: str, tools: Sequence[str]) -> None:
    for chip in (*chips, reference):
        check_chip(chip)
    folders = [folder_of(chip, Path()).name for chip in chips]
    if not chips or len(set(folders)) < len(folders) or "reference" in folders:
        raise ValueError(f"chips: {', '.join(chips) or 'none'}, expected different ones")
    for tool in tools:
        if tool not in TOOLS:
            raise ValueError(f"there is no tool {tool!r} to look on, only {', '.join(TOOLS)}")


def folder_of(chip: str, output: Path) -> Path:
    """Where the findings on a chip lie."""
    return output / Path(chip).stem
