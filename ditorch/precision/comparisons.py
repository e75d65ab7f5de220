"""What has been compared so far: one finding for each operator, tensor and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.errors import merged
from ditorch.precision.results import OperatorFinding, Where
from ditorch.precision.standards import Standards
from ditorch.precision.verdict import Judgement

Judged = tuple[str, Tensor, Judgement]


class Comparisons:
    def __init__(self, standards: Standards) -> None:
        self._standards = standards
        self._findings: dict[tuple[str, str, str], OperatorFinding] = {}
        self._first_bad: Where | None = None
        self._first_bad_reason = ""
        self._calls = 0
        self._notes: Counter[tuple[str, str]] = Counter()

    def add_call(
        self,
        call: Call,
        judged: Sequence[Judged],
        mutated: Sequence[str],
        ran_on_host: bool,
        note: str,
    ) -> None:
        """One call: the verdicts on its tensors, and the inputs it changed and should not have."""
        self._calls += bool(judged)
        if note:
            self._notes[call.operator, note] += 1
        if not judged:
            self._add_uncompared(call, ran_on_host, note)
        added: set[int] = set()
        for name, tensor, judgement in judged:
            dtype = str(tensor.dtype).removeprefix("torch.")
            finding = self._finding(call, name, dtype, judgement.operator_class)
            if id(finding) not in added:
                finding.calls += 1
                finding.host_calls += ran_on_host
            self._add_verdict(call, finding, judgement, id(finding) not in added)
            added.add(id(finding))
        for name in mutated:
            finding = self._finding(call, name, "", self._standards.class_of(call.operator))
            finding.calls += 1
            finding.threshold = "unchanged"
            self._fail(call, finding, f"it changed its input {name}")

    def fields(self) -> dict[str, Any]:
        """Fields of `Findings`."""
        operators = sorted(self._findings.values(), key=lambda each: (each.passed, each.operator))
        return {
            "operators": [each.model_copy(deep=True) for each in operators],
            "passed": self._first_bad is None,
            "summary": self._summary(),
            "first_bad": self._first_bad,
            "first_bad_reason": self._first_bad_reason,
            "notes": [
                f"{operator}: {calls} call{'s' * (calls > 1)}: {note}"
                for (operator, note), calls in sorted(self._notes.items())
            ],
        }

    def _finding(self, call: Call, name: str, dtype: str, operator_class: str) -> OperatorFinding:
        tensor = _of_a_list(call, name)
        key = (call.operator, tensor, dtype)
        if key not in self._findings:
            self._findings[key] = OperatorFinding(
                operator=call.operator, tensor=tensor, operator_class=operator_class, dtype=dtype
            )
        return self._findings[key]

    def _add_uncompared(self, call: Call, ran_on_host: bool, note: str) -> None:
        finding = self._finding(call, "out", "", self._standards.class_of(call.operator))
        finding.calls += 1
        finding.host_calls += ran_on_host
        finding.threshold = "not compared"
        finding.reason = finding.reason or note or "it returns no tensor"

    def _add_verdict(
        self, call: Call, finding: OperatorFinding, judgement: Judgement, is_first: bool
    ) -> None:
        worst = judgement.errors.worst_share_of_threshold
        if not finding.threshold or worst > finding.errors.worst_share_of_threshold:
            finding.threshold = judgement.threshold
            finding.worst = judgement.worst
            finding.worst_where = Where.of(call.place) if judgement.worst else None
        finding.errors = merged([finding.errors, judgement.errors])
        if not judgement.passed:
            self._fail(call, finding, judgement.reason, counts=is_first)

    def _fail(self, call: Call, finding: OperatorFinding, reason: str, counts: bool = True) -> None:
        finding.failed_calls += counts
        finding.passed = False
        if finding.first_failed is None:
            finding.first_failed = Where.of(call.place)
            finding.reason = reason
        if self._first_bad is None:
            self._first_bad = Where.of(call.place)
            self._first_bad_reason = f"{call.place}: {reason}"

    def _summary(self) -> str:
        names = {each.operator for each in self._findings.values() if each.threshold != _NOT}
        failed = sorted({each.operator for each in self._findings.values() if not each.passed})
        compared = f"{self._calls} calls of {len(names)} operators compared"
        if not failed:
            return f"{compared}: all are within the standards"
        return f"{compared}: {', '.join(failed)} failed, first {self._first_bad_reason}"


_NOT = "not compared"


def _of_a_list(call: Call, name: str) -> str:
    """The tensors of one list are one: "self.17" of a list operator is "self"."""
    returns = call.func._schema.returns
    if name.startswith("out.") and len(returns) > 1:
        return name
    return name.split(".")[0]
