"""The conformance suite: the runtime part and the operators, on this process's chip."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter

import ditorch
from ditorch.conform.operators import DATABASE, operator_names
from ditorch.conform.pool import ProcessReport, run_jobs
from ditorch.conform.results import (
    CheckResult,
    Conformance,
    OperatorResult,
    Outcome,
    Settings,
    write_conformance,
)
from ditorch.conform.worker import Job
from ditorch.precision.results import write_atomically

PARTS = ("runtime", "operators")

Progress = Callable[[int, int, str], None]  # (jobs done, jobs in all, the job that is done)

_LINE: TypeAdapter[OperatorResult | CheckResult] = TypeAdapter(OperatorResult | CheckResult)


def run_conformance(
    *,
    output: Path,
    only: set[str] | None = None,
    operators: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    samples_per_dtype: int = 2,
    seed: int = 0,
    workers: int = 2,
    deadline_s: float = 60.0,
    within_s: float = math.inf,
    preload: Sequence[str] = (),
    resume: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Conformance:
    """Checks the chip and writes `output` (JSON), atomically, when all is done.

    Args:
        only: parts to run, of `PARTS`; None: all.
        operators: glob patterns of operators' names, such as "linalg.*"; None: all.
        dtypes: names such as "bfloat16"; None: all that the CPU supports.
        samples_per_dtype: inputs of each operator and dtype, chosen among those PyTorch has.
        workers: processes; each loads the chip for itself.
        deadline_s: for one operator; one that takes longer has failed, and the rest goes on.
        within_s: once a process has started, it begins no operator after so many seconds; which
            are left out is by `seed`.
        preload: modules that each process imports first, such as a vendor's kernels in Python.
        resume: go on where a run with equal settings was interrupted.

    Raises:
        ValueError: a pattern, dtype or part that does not exist, or the run to resume had other
            settings, another chip or another PyTorch.
        ImportError: PyTorch's test modules need a package that is not installed.
        OSError: `output` cannot be written.
    """
    settings = Settings(list(operators or ()), list(dtypes or ()), samples_per_dtype, seed)
    parts = _checked(only)
    jobs = _jobs(parts, settings)
    conformance = _conformance(settings)
    started = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    journal = output.with_suffix(".partial.jsonl")
    done = _resume(journal, conformance) if resume else {}
    kept = [json.dumps(_heading(conformance)) + "\n", *map(_line, done.values())]
    write_atomically(journal, "".join(kept).encode())  # without a line that was cut off
    with journal.open("a", encoding="utf-8") as file:

        def keep(job: Job, result: OperatorResult | CheckResult) -> None:
            done[job] = result
            file.write(_line(result))
            file.flush()
            progress(len(done), len(jobs), job.name)

        run_jobs(
            [job for job in _in_turn(jobs, within_s, seed) if job not in done],
            _Listener(keep).hear,
            workers=workers,
            settings=settings,
            preload=[*([DATABASE] if "operators" in parts else []), *preload],
            log=output.with_suffix(".log"),
            job_s=deadline_s,
            within_s=within_s,
        )
    conformance.left_out = len(jobs) - len(done)
    for job in (job for job in jobs if job in done):
        result = done[job]
        if isinstance(result, OperatorResult):
            conformance.operators.append(result)
        else:
            conformance.checks.append(result)
    conformance.elapsed_s = time.monotonic() - started
    write_conformance(conformance, output)
    journal.unlink()
    return conformance


class _Listener:
    """Makes results of what the jobs' processes report."""

    def __init__(self, keep: Callable[[Job, OperatorResult | CheckResult], None]) -> None:
        self._keep = keep
        self._results: dict[Job, OperatorResult] = {}
        self._in_hand: dict[Job, Outcome] = {}

    def hear(self, job: Job, report: ProcessReport) -> None:
        if job.part == "runtime":
            self._hear_check(job, report)
            return
        result = self._results.setdefault(job, OperatorResult(job.name))
        if report.kind == "about to":
            dtype, variant, sample = report.content
            self._in_hand[job] = Outcome(dtype, variant, sample, "failed")
        elif report.kind == "outcome":
            self._record(result, report.content)
        elif report.kind == "lost":
            unknown = Outcome("none", "none", 0, "failed")
            result.record(replace(self._in_hand.get(job, unknown), reason=report.content))
        else:
            result.kernels = report.content["kernels"]
            result.fallbacks = report.content["fallbacks"]
            result.elapsed_s = report.content["elapsed_s"]
        if report.kind in ("lost", "end"):
            self._keep(job, self._results.pop(job))

    @staticmethod
    def _record(result: OperatorResult, outcome: dict[str, object] | None) -> None:
        if outcome is None:
            result.refused_by_cpu += 1
        else:
            result.record(Outcome(**outcome))  # type: ignore[arg-type]

    def _hear_check(self, job: Job, report: ProcessReport) -> None:
        group, _, name = job.name.partition(": ")
        if report.kind == "lost":
            self._keep(job, CheckResult(group, name, "failed", report.content))
        else:
            self._keep(job, CheckResult(group, name, **report.content))


def _checked(only: set[str] | None) -> set[str]:
    if unknown := (only or set()) - set(PARTS):
        raise ValueError(f"there is no part {sorted(unknown)[0]!r}, only {' and '.join(PARTS)}")
    return only or set(PARTS)


def _jobs(parts: set[str], settings: Settings) -> list[Job]:
    for name in settings.dtypes:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r} is not a dtype of PyTorch such as 'float32'")
    jobs = []
    if "runtime" in parts:
        from ditorch.conform import runtime

        jobs += [Job("runtime", f"{check.group}: {check.name}") for check in runtime.CHECKS]
    if "operators" in parts:
        jobs += [Job("operators", name) for name in operator_names(settings.operators)]
    return jobs


def _in_turn(jobs: list[Job], within_s: float, seed: int) -> list[Job]:
    """Shuffles the operators where time is limited: not the alphabet chooses which have it."""
    if math.isinf(within_s):
        return jobs
    shuffled = random.Random(seed).sample(jobs, len(jobs))
    return sorted(shuffled, key=lambda job: job.part == "operators")


def _conformance(settings: Settings) -> Conformance:
    chip = ditorch.chip()
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return Conformance(
        chip.vendor, chip.chip_type, ditorch.device.type, torch.__version__, command, settings
    )


def _heading(conformance: Conformance) -> dict[str, object]:
    """What must be equal for a run to be the continuation of another."""
    return {
        "vendor": conformance.vendor,
        "chip_type": conformance.chip_type,
        "torch": conformance.torch_version,
        **asdict(conformance.settings),
    }


def _line(result: OperatorResult | CheckResult) -> str:
    return _LINE.dump_json(result).decode() + "\n"


def _resume(journal: Path, conformance: Conformance) -> dict[Job, OperatorResult | CheckResult]:
    """The results of an interrupted run; none if there was none.

    Raises ValueError: its settings were others, so that its results are of no use to this one.
    """
    if not journal.is_file():
        return {}
    heading, *lines = journal.read_bytes().splitlines() or [b""]
    _check_heading(journal, heading, conformance)
    done: dict[Job, OperatorResult | CheckResult] = {}
    for line in lines:
        try:
            result = _LINE.validate_json(line)
        except ValueError:
            break  # the line that was being written
        if isinstance(result, OperatorResult):
            done[Job("operators", result.name)] = result
        else:
            done[Job("runtime", f"{result.group}: {result.name}")] = result
    return done


def _check_heading(journal: Path, heading: bytes, conformance: Conformance) -> None:
    try:
        before = json.loads(heading)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{journal}: cannot be resumed, expected the settings in its first line")
    for name, value in _heading(conformance).items():
        if before.get(name) != value:
            raise ValueError(
                f"{journal}: {name} is {value!r} where the run to resume has "
                f"{before.get(name)!r}, expected the same"
            )
