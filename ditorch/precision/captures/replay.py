"""Replay: captured calls run again on this process's chip, from the captured inputs.

    replay(Path("runs/gpu"), standards=load_standards(), operators="*softmax*")

Each output is judged against the truth, computed in float64 from the same inputs, and by the ratio
of its error to that of the captured output, which is the reference GPU's own.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

import ditorch
from ditorch.precision import tensors
from ditorch.precision.call import Call
from ditorch.precision.capture import outputs_of
from ditorch.precision.captures.arguments import NotReplayable
from ditorch.precision.captures.judging import truth_of
from ditorch.precision.captures.recording import Recording, open_capture
from ditorch.precision.captures.records import CallRecord
from ditorch.precision.captures.remake import remake_call
from ditorch.precision.captures.statistics import dtype_name, on_host
from ditorch.precision.reference import Reference
from ditorch.precision.results import Findings, OperatorFinding, Where
from ditorch.precision.select import Select, Selection
from ditorch.precision.standards import Standards
from ditorch.precision.tool import new_findings


def replay(capture: Path, *, standards: Standards, **selection: Unpack[Selection]) -> Findings:
    """Runs the selected calls of a capture taken with tensors="all", of every rank.

    What cannot be run again, and why, is in the findings' notes.

    Raises:
        ValueError: the capture cannot be read, or holds no call that can be run again.
    """
    select = Select.of(**selection)
    found = _Replay(standards)
    for recording in open_capture(capture).values():
        for step in recording.steps:
            for record in recording.step(step).calls:
                if select.matches(record.place(recording.manifest.rank, step)):
                    found.run(recording, step, record)
    if found.is_empty:
        raise ValueError(f"{capture}: no call can be run again: {found.why_empty}")
    return found.findings()


class _Replay:
    """The findings as they come together."""

    def __init__(self, standards: Standards) -> None:
        self._standards = standards
        self._operators: dict[tuple[str, str, str], OperatorFinding] = {}
        self._first_bad: Where | None = None
        self._first_reason = ""
        self._skipped: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._steps: set[int] = set()
        self._reference = ""
        self._calls = 0

    def run(self, recording: Recording, step: int, record: CallRecord) -> None:
        """Runs one call again, or notes why it cannot be."""
        try:
            call = remake_call(recording, step, record, ditorch.device)
            _check_replayable(call)
            truth = truth_of(call, self._standards)  # before the call writes its inputs
            captured = {use.name: recording.tensor(use) for use in record.outputs}
        except NotReplayable as error:
            self._skipped[f"{record.operator}: {error}"] += 1
            return
        self._calls += 1
        self._steps.add(step)
        self._reference = f"{recording.manifest.chip} ({recording.manifest.device})"
        self._notes[f"{record.operator}: {truth.note}"] += bool(truth.note)
        try:
            with torch.no_grad():
                results = outputs_of(call, call.func(*call.args, **call.kwargs))
            hosts = on_host([tensor for _, tensor in results])
        except RuntimeError as error:
            finding = self._finding(record.operator, "out", "")
            finding.calls += 1
            reason = f"does not run on {ditorch.device}: {str(error).splitlines()[0]}"
            self._fail(finding, Where.of(call.place), reason)
            return
        for (name, _), actual in zip(results, hosts, strict=True):
            self._judge(truth, Where.of(call.place), name, actual, captured.get(name))

    def findings(self) -> Findings:
        failed = sum(each.failed_calls for each in self._operators.values())
        first = self._first_bad
        summary = f"{self._calls} calls were run again, and none departs from the standard"
        if first is not None:
            module = first.module or "the program"
            summary = (
                f"{failed} outputs of {self._calls} calls fail, the first at {module}, "
                f"{first.operator} #{first.index}, step {first.step}, {first.phase} "
                f"({first.source}): {self._first_reason}"
            )
        return new_findings(
            "replay",
            reference=self._reference,
            passed=not failed,
            summary=summary,
            operators=[self._operators[key] for key in sorted(self._operators)],
            first_bad=first,
            first_bad_reason=self._first_reason,
            notes=[
                *(f"not run again: {why} ({n})" for why, n in self._skipped.most_common()),
                *(f"{note} ({n})" for note, n in (+self._notes).most_common()),
            ],
        ).model_copy(update={"steps": len(self._steps)})

    @property
    def is_empty(self) -> bool:
        return not self._calls

    @property
    def why_empty(self) -> str:
        """The commonest reason why calls were left out."""
        return self._skipped.most_common(1)[0][0] if self._skipped else "no call is selected"

    def _judge(
        self, truth: Reference, where: Where, name: str, actual: Tensor, captured: Tensor | None
    ) -> None:
        if name not in truth.tensors:
            self._notes[f"{where.operator}: nothing says what {name} ought to be"] += 1
            return
        own = truth.judge(name, captured, self._standards).errors if captured is not None else None
        judgement = truth.judge(name, actual, self._standards, own)
        is_list = "._foreach_" in where.operator  # one operator for all tensors of a list
        tensor = name.partition(".")[0] if is_list else name
        finding = self._finding(where.operator, tensor, dtype_name(actual.dtype))
        finding.calls += 1
        finding.operator_class = judgement.operator_class
        worst = finding.errors.worst_share_of_threshold
        if finding.calls == 1 or judgement.errors.worst_share_of_threshold > worst:
            finding.errors, finding.reference_errors = judgement.errors, own
            finding.threshold, finding.worst = judgement.threshold, judgement.worst
            finding.worst_where = where
        if not judgement.passed:
            self._fail(finding, where, judgement.reason)

    def _finding(self, operator: str, tensor: str, dtype: str) -> OperatorFinding:
        return self._operators.setdefault(
            (operator, tensor, dtype),
            OperatorFinding(operator=operator, tensor=tensor, dtype=dtype),
        )

    def _fail(self, finding: OperatorFinding, where: Where, reason: str) -> None:
        finding.passed = False
        finding.failed_calls += 1
        if finding.first_failed is None:
            finding.first_failed, finding.reason = where, reason
        if self._first_bad is None:
            self._first_bad, self._first_reason = where, reason


def _check_replayable(call: Call) -> None:
    if tensors.is_communication(call):
        raise NotReplayable("it needs the other ranks")
    if tensors.is_random(call):
        raise NotReplayable("it draws random numbers")
