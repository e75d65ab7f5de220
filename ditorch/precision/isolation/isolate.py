"""Isolate: which operator makes a chip's losses depart from the reference's, from losses alone.

The script is run again and again for as few steps as show the departure, each time with other
operators computed by the host (`Fallback`). Where the losses agree again, the guilty ones are among
those on the host: the smallest such set is searched by halving. If with it on the host the losses
of the whole run still depart, later, the search goes on; then it is the turn of the modules.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ditorch.precision.isolation.runs import Run, RunError, Runs, chip_digest
from ditorch.precision.loss import BAR, relative_errors
from ditorch.precision.results import (
    Findings,
    LossCurve,
    Observed,
    findings_path,
    read_findings,
    write_atomically,
    write_findings,
)

Progress = Callable[[str], None]

_TRIALS = "isolate-trials"  # a folder of nobody else's: it is removed


class OutOfRuns(Exception):
    """The search may run the script no more; one of the suspects is guilty."""

    suspects: Sequence[str] = ()


def isolate(
    script: Path,
    args: Sequence[str] = (),
    *,
    chip: str,
    output: Path,
    reference: str = "cpu",
    reference_losses: Sequence[float] | None = None,
    bar: float = BAR,
    max_runs: int = 100,
    deadline_s: float = 600,
    progress: Progress = lambda _: None,
) -> Findings:
    """Names the operators, and their modules, whose results on `chip` move the script's losses.

    An isolation that was killed goes on where it was when it is called again with the same
    `output`; one that has finished begins anew. The findings are written there as well.

    Args:
        chip: "b" or a chip file's path for an emulated chip, or a vendor's name.
        reference: where the right losses come from, likewise, unless `reference_losses` has them.
        bar: losses whose mean relative error is below it agree (H2, equation 1).
        max_runs: runs of the script; then the operators still suspected are reported.
        deadline_s: of one run.
        progress: is told of each run in a line of text.

    Raises:
        ValueError: the script does not exist, its losses cannot be compared, or max_runs is below
            the 3 that one comparison takes.
        RunError: a run does not end in time, or the script fails on the chip as it is.
    """
    if max_runs < 3:
        raise ValueError(f"max_runs is {max_runs}, expected at least 3")
    finished = findings_path(output, "isolate", 0)
    if finished.exists():
        finished.unlink()
        shutil.rmtree(output / _TRIALS, ignore_errors=True)
    with Runs(script, args, deadline_s=deadline_s) as runs:
        trials = _Trials(runs, output / _TRIALS, max_runs, progress)
        if reference_losses is None:
            right = trials.losses(reference, None, "reference")
        elif not (right := list(reference_losses)):
            raise ValueError("reference_losses is empty, expected one for each step")
        findings = _Isolation(trials, chip, right, bar).findings()
    findings.reference = reference if reference_losses is None else "losses given"
    write_findings(findings, output)
    return findings


class _Isolation:
    """The search: operators first, until the losses of the whole run agree, then their modules."""

    def __init__(self, trials: _Trials, chip: str, right: list[float], bar: float) -> None:
        self.trials, self.chip, self.right, self.bar = trials, chip, right, bar
        self.losses = trials.losses(chip, len(right), "as it is")
        self.error = fmean(relative_errors(right, self.losses))
        self.guilty: list[str] = []
        self.modules: list[str] = []
        self.calls: list[Observed] = []  # of guilty operators, in those modules if they are known
        self.curves = [("reference", right), (chip, self.losses)]
        self.notes: list[str] = []

    def findings(self) -> Findings:
        agreed = self.error < self.bar
        summary = f"losses agree: {self._mre()}, below {self.bar:.3%}; nothing to isolate"
        if not agreed:
            try:
                summary = self._search()
            except OutOfRuns as stop:
                known = f"{_named(stop.suspects) or 'other operators'} suspected"
                known += f", {_named(self.guilty)} guilty" if self.guilty else ""
                summary = f"{self._mre()}; {self.trials.count} runs were not enough: {known}"
        return Findings(
            tool="isolate",
            chip=self.chip,
            steps=len(self.right),
            passed=agreed,
            summary=summary,
            mean_relative_error=self.error,
            losses=[LossCurve(name=name, losses=losses) for name, losses in self.curves],
            guilty=self.guilty,
            guilty_modules=self.modules,
            first_bad=self.calls[0].first if self.calls else None,
            first_bad_reason=summary if self.calls else "",
            notes=self.notes,
        )

    def _search(self) -> str:
        losses, error = self.losses, self.error
        while not error < self.bar:  # again, if there are guilty ones that act later
            judge = _Judge(self.right, losses, self.bar)
            everything = self.trials.run(
                self.chip, judge.steps, "all on host", fallback={"operators": "*"}, observe={}
            )
            judge.learn(everything)
            self.notes += judge.notes()
            observed, on_host = _ran_on_host(everything)
            operators = [each for each in on_host if each not in self.guilty]
            if judge.is_hopeless() or not operators:
                return self._not_an_operator()
            self._find_operators(judge, operators)
            self.calls = [each for each in observed if each.first.operator in self.guilty]
            fallback = {"operators": self.guilty}
            what = f"{_named(self.guilty)} on host, all steps"
            losses = self.trials.losses(self.chip, len(self.right), what, fallback=fallback)
            error = fmean(relative_errors(self.right, losses))
        self.curves.append((f"{self.chip} with {_named(self.guilty)} on the host", losses))
        self._find_modules(judge)
        return self._sentence(error)

    def _find_operators(self, judge: _Judge, operators: list[str]) -> None:
        before = list(self.guilty)

        def agrees(some: Sequence[str]) -> bool:
            return self._agrees(judge, _named(some), operators=[*before, *some])

        self.guilty = before + smallest_set(operators, agrees)

    def _find_modules(self, judge: _Judge) -> None:
        names = list(dict.fromkeys(each.first.module for each in self.calls if each.first.module))

        def agrees(some: Sequence[str]) -> bool:
            what = f"{_named(self.guilty)} in {_named(some, 'modules')}"
            return self._agrees(judge, what, operators=self.guilty, modules=some)

        try:
            if not names or not agrees(names):
                return  # guilty calls are outside the modules
            found = smallest_set(names, agrees)
        except OutOfRuns:
            self.notes.append(f"{self.trials.count} runs were not enough to name the modules")
            return
        self.modules = [name for name in names if name in found]
        self.calls = [each for each in self.calls if each.first.module in found]

    def _agrees(self, judge: _Judge, what: str, **fallback: Sequence[str]) -> bool:
        run = self.trials.run(self.chip, judge.steps, f"{what} on host", fallback=fallback)
        verdict = judge.agrees(run)
        self.trials.progress(f"  {judge.reason}")
        return verdict

    def _mre(self) -> str:
        finite = math.isfinite(self.error)
        return f"MRE {self.error:.3%}" if finite else "losses that are not finite"

    def _not_an_operator(self) -> str:
        besides = f" besides {_named(self.guilty)}" if self.guilty else ""
        return (
            f"not an operator's arithmetic{besides}: {self._mre()}, and the losses depart with "
            "every operator on the host too; compare the data, random numbers, initial weights "
            "and communication"
        )

    def _sentence(self, remaining: float) -> str:
        where = f" in {_named(self.modules, 'modules')}" if self.modules else ""
        source = self.calls[0].first.source if self.calls else ""
        return (
            f"{_named(self.guilty)}{where}{f' ({source})' if source else ''}: {self._mre()}, and "
            f"{remaining:.3%} with {'it' if len(self.guilty) == 1 else 'them'} on the host; "
            f"{self.trials.count} runs"
        )


def smallest_set(items: Sequence[str], agrees: Callable[[list[str]], bool]) -> list[str]:
    """A smallest set of items that agrees, where all do, none does not, and more never agree less.

    Takes about log2(len(items)) questions for each of the set's members.
    """
    items, found = list(items), list[str]()
    suspects = items
    try:
        while True:
            low, high = 0, len(items)  # with what is found, items[:high] agrees, items[:low] not
            while high - low > 1:
                middle = (low + high) // 2
                if agrees(found + items[:middle]):
                    high = middle
                else:
                    low = middle
                suspects = items[low:high]
            found.append(items[high - 1])  # nothing before it can do without it
            items = items[: high - 1]
            suspects = found
            if not items or agrees(found):
                return found
    except OutOfRuns as stop:
        stop.suspects = suspects
        raise


class _Judge:
    """Whether a trial's losses agree with the reference's."""

    def __init__(self, right: Sequence[float], chip: Sequence[float], bar: float) -> None:
        errors = relative_errors(right, chip)
        # As few steps as show the departure: healthy chips drift apart too, later.
        self.steps = 1 + next(step for step, error in enumerate(errors) if not error < bar)
        self._right = right[: self.steps]
        self._bar = bar
        self._departed = self._error(chip)
        self._remaining = 0.0
        self.margin = 0.0
        self.reason = ""

    def learn(self, everything_on_host: Run) -> None:
        """Sets the margin half way, in decades, between the departure and what the host leaves."""
        losses = everything_on_host.losses()
        if everything_on_host.exit_code != 0 and len(losses) < self.steps:
            why = everything_on_host.last_words()
            raise RunError(f"the script fails with every operator on the host: {why}")
        self._remaining = self._error(losses)
        floor = max(self._remaining, self._bar / 100)
        self.margin = math.sqrt(min(self._departed, 1.0) * min(floor, 1.0))

    def is_hopeless(self) -> bool:
        return not self._remaining < self._departed / 3

    def agrees(self, run: Run) -> bool:
        error = self._error(run.losses() if run.exit_code == 0 else [])
        agreed = error < self.margin
        self.reason = f"{'agrees' if agreed else 'departs'}: largest relative error {error:.2e}"
        if run.exit_code != 0:
            self.reason += f", for it failed: {run.last_words()}"
        return agreed

    def notes(self) -> list[str]:
        return [
            f"the losses depart at step {self.steps - 1}: trials take {self.steps} steps",
            f"largest relative error of their losses: {self._departed:.2e} on the chip, "
            f"{self._remaining:.2e} with everything on the host; trials agree below "
            f"{self.margin:.2e}",
        ]

    def _error(self, losses: Sequence[float]) -> float:
        """The largest relative error; inf for NaN and for a run that failed before its end."""
        losses = losses[: self.steps]
        if len(losses) < self.steps or not all(math.isfinite(loss) for loss in losses):
            return math.inf
        return max(relative_errors(self._right, losses))


class _Trials:
    """Runs of the script, each one kept in a folder so that none is made twice."""

    def __init__(self, runs: Runs, folder: Path, max_runs: int, progress: Progress) -> None:
        self.progress = progress
        self.count = 0
        self._runs = runs
        self._folder = folder
        self._max_runs = max_runs
        self._known: dict[Path, Run] = {}

    def run(self, chip: str, stop_after: int | None, what: str, **tools: dict[str, Any]) -> Run:
        folder = self._folder_of(chip, stop_after, tools)
        if folder in self._known:
            return self._known[folder]
        if self.count == self._max_runs:
            raise OutOfRuns
        self.count += 1
        self.progress(f"run {self.count} on {chip}: {what}")
        done = folder / "done.json"
        if done.exists():
            run = Run(folder, json.loads(done.read_text())["exit_code"])
        else:
            with_output = {
                name: {**t, "output": str(folder)} if name in _WRITE else t
                for name, t in tools.items()
            }
            run = self._runs.run(chip, folder, stop_after=stop_after, **with_output)
            content = {"what": what, "chip": chip, "exit_code": run.exit_code}
            write_atomically(done, json.dumps(content).encode())
        self._known[folder] = run
        return run

    def losses(
        self, chip: str, steps: int | None, what: str, **tools: dict[str, Any]
    ) -> list[float]:
        """Raises RunError if the script fails, or ends before it has taken `steps` steps."""
        run = self.run(chip, steps, what, **tools)
        losses = run.losses()
        if run.exit_code != 0 or (steps is not None and len(losses) < steps):
            raise RunError(
                f"{self._runs.script} fails on {chip} after {len(losses)} losses: "
                f"{run.last_words()}"
            )
        return losses

    def _folder_of(self, chip: str, *what: Any) -> Path:
        script = self._runs.script.read_bytes()
        identity = json.dumps([script.hex(), self._runs.args, chip, chip_digest(chip), *what])
        return self._folder / hashlib.sha256(identity.encode()).hexdigest()[:16]


_WRITE = ("fallback", "observe")


def _ran_on_host(run: Run) -> tuple[list[Observed], list[str]]:
    """Every call seen, and the operators that the host could take, in the order of first calls."""
    observed = [
        each
        for path in sorted(run.output.glob("observe-rank*.json"))
        for each in read_findings(path).observed
    ]
    taken: set[str] = set()
    for path in run.output.glob("fallback-rank*.json"):
        taken.update(read_findings(path).fallbacks)
    seen = dict.fromkeys(each.first.operator for each in observed)
    return observed, [operator for operator in seen if operator in taken]


def _named(names: Sequence[str], kind: str = "operators") -> str:
    return " and ".join(names) if len(names) <= 4 else f"{len(names)} {kind}"
