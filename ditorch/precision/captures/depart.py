"""Where a run departs from a reference run, by two captures taken in processes that never met.

Calls are aligned by rank, step, phase, module, operator and count. Two right chips drift apart by
rounding, chaotically as training goes on, so a call is judged by what its own inputs explain: the
guilty call is the first whose inputs agree and whose outputs do not. Where the
other run keeps all tensors, a call whose outputs differ is judged by the standards, against the
truth for its own inputs (`judging.py`); otherwise by its statistics (`closeness.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path

from ditorch.precision.captures.arguments import NotReplayable
from ditorch.precision.captures.closeness import (
    GAIN,
    Closeness,
    Side,
    closeness,
    input_distances,
    shapes_agree,
)
from ditorch.precision.captures.judging import truth_of_record
from ditorch.precision.captures.recording import Recording, open_capture
from ditorch.precision.captures.records import CallRecord
from ditorch.precision.captures.remake import kept_tensors
from ditorch.precision.place import Place
from ditorch.precision.results import Findings, OperatorFinding, Where
from ditorch.precision.standards import Standards

_UNEXPLAINED = 1e-2  # least relative distance of an input that no earlier call accounts for
_LEAST_ALIGNED = 0.2  # of the smaller run's calls: below, the two are not one program
_MOST_NOTES = 10

_Ranks = dict[int, Recording]


@dataclass(frozen=True)
class _Departure:
    where: Where
    reason: str


@dataclass
class _Account:
    """What the calls of all ranks and steps came to."""

    operators: dict[tuple[str, str], OperatorFinding] = field(default_factory=dict)
    departures: list[_Departure] = field(default_factory=list)  # one a rank and step, in order
    only_ours: Counter[str] = field(default_factory=Counter)  # calls not aligned, by operator
    only_theirs: Counter[str] = field(default_factory=Counter)
    not_judged: Counter[str] = field(default_factory=Counter)  # random and so free to differ
    furthest: float = 0.0  # the largest distance of an output so far: what drift explains
    calls: int = 0
    too_far: int = 0  # of `calls`, those whose inputs differ so much that anything would agree


def depart(reference: Path, other: Path, *, standards: Standards) -> Findings:
    """Names the first call of `other` that departs from `reference`, in the reference's order.

    Raises:
        ValueError: the captures cannot be read or compared; one sentence.
    """
    ours, theirs = open_capture(reference), open_capture(other)
    _check_comparable(ours, theirs, f"{reference} and {other}")
    account = _Account()
    steps = sorted({step for rank in ours.values() for step in rank.steps})
    for step in steps:
        for rank in sorted(ours.keys() & theirs.keys()):
            if step in ours[rank].steps and step in theirs[rank].steps:
                _Step(ours[rank], theirs[rank], step, standards, account).compare()
    return _findings(account, ours, theirs)


def _check_comparable(ours: _Ranks, theirs: _Ranks, both: str) -> None:
    sizes = [next(iter(run.values())).manifest.world_size for run in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{both}: cannot be compared: of {sizes[0]} and of {sizes[1]} ranks")
    common = [
        set(ours[rank].steps) & set(theirs[rank].steps) for rank in ours.keys() & theirs.keys()
    ]
    if not any(common):
        raise ValueError(f"{both}: cannot be compared: no rank has a finished step in both")


class _Step:
    """One step of one rank, in two runs."""

    def __init__(
        self, ours: Recording, theirs: Recording, step: int, standards: Standards, account: _Account
    ) -> None:
        self._ours, self._theirs = ours, theirs
        self._a, self._b = ours.step(step), theirs.step(step)
        self._standards = standards
        self._account = account
        self._step = step
        self._departed = False
        self._keeps_all = theirs.manifest.tensors == "all"

    def compare(self) -> None:
        pairs = self._align()
        if len(pairs) < _LEAST_ALIGNED * min(len(self._a.calls), len(self._b.calls)):
            raise ValueError(
                f"{self._ours.folder} and {self._theirs.folder}: cannot be compared: only "
                f"{len(pairs)} of {len(self._a.calls)} calls of step {self._step} are in both, so "
                "they are not of one program"
            )
        for call, other in pairs:
            self._compare(Side(call, self._a.statistics), Side(other, self._b.statistics))

    def _align(self) -> list[tuple[CallRecord, CallRecord]]:
        """Calls that are the same call in both runs, in the order of ours.

        Where a module calls an operator more often in one run (another vendor's torch fuses what
        ours composes), counting would pair calls that have nothing to do with each other.
        """
        counts = [Counter(call.group for call in step.calls) for step in (self._a, self._b)]
        uneven = {group for group in counts[0] | counts[1] if counts[0][group] != counts[1][group]}
        for step, only in (
            (self._a, self._account.only_ours),
            (self._b, self._account.only_theirs),
        ):
            only.update(call.operator for call in step.calls if call.group in uneven)
        others = {call.key: call for call in self._b.calls if call.group not in uneven}
        return [(call, others[call.key]) for call in self._a.calls if call.key in others]

    def _compare(self, ours: Side, theirs: Side) -> None:
        call, account = ours.call, self._account
        if not shapes_agree(call.inputs, theirs.call.inputs):
            raise ValueError(
                f"{self._ours.folder} and {self._theirs.folder}: cannot be compared: the inputs of "
                f"{self._place(call)} are of shapes {_shapes(call)} and {_shapes(theirs.call)}"
            )
        account.calls += 1
        found = self._measure(ours, theirs)
        finding = self._finding(call, found)
        reason = self._why_it_departs(ours.call, theirs.call, found)
        if self._standards.numbers_of(call.operator).rule == "not compared":
            account.not_judged[call.operator] += found.output > 0
        elif reason:
            self._fail(call, finding, reason)
        else:
            self._look_at_inputs(ours, theirs)
        account.too_far += found.inputs * GAIN > 1
        if isfinite(found.output):
            account.furthest = max(account.furthest, found.output)

    def _why_it_departs(self, call: CallRecord, other: CallRecord, found: Closeness) -> str:
        """A sentence; empty if it does not depart."""
        if found.output == 0:
            return ""
        if self._keeps_all and found.output != inf:
            try:
                verdict = self._verdict(other)
                return f"{_measured(found)}; {verdict}" if verdict else ""
            except NotReplayable:
                pass  # no reference, or the budget left a tensor out: the statistics have to do
        return _measured(found) if found.departs else ""

    def _verdict(self, call: CallRecord) -> str:
        """Why the other run's outputs are not right for the inputs they had; empty if they are."""
        truth = truth_of_record(self._theirs, self._step, call, self._standards)
        outputs = kept_tensors(self._theirs, call.outputs)
        for use, actual in zip(call.outputs, outputs, strict=True):
            if use.name in truth.tensors:
                judgement = truth.judge(use.name, actual, self._standards)
                if not judgement.passed:
                    return judgement.reason
        return ""

    def _fail(self, call: CallRecord, finding: OperatorFinding, reason: str) -> None:
        finding.failed_calls += 1
        finding.passed = False
        finding.first_failed = finding.first_failed or self._where(call)
        finding.reason = finding.reason or reason
        self._depart(call, reason)

    def _measure(self, ours: Side, theirs: Side) -> Closeness:
        if not shapes_agree(ours.call.outputs, theirs.call.outputs):
            return Closeness(0.0, "out", inf, 0.0)
        return closeness(ours, theirs, self._standards)

    def _look_at_inputs(self, ours: Side, theirs: Side) -> None:
        """Inputs may come from calls that only one run has, or from outside the program."""
        name, apart = max(
            input_distances(ours, theirs).items(), key=lambda item: item[1], default=("", 0.0)
        )
        if apart > max(_UNEXPLAINED, GAIN * self._account.furthest):
            tensor = f"its input {name}" if name else "its arguments"
            self._depart(
                ours.call,
                f"{tensor} already differed by {apart:.1e}, relatively, which no call that both "
                "runs have accounts for",
            )
            self._account.furthest = max(self._account.furthest, apart)

    def _depart(self, call: CallRecord, reason: str) -> None:
        if not self._departed:
            self._account.departures.append(_Departure(self._where(call), reason))
        self._departed = True

    def _finding(self, call: CallRecord, found: Closeness) -> OperatorFinding:
        dtype = call.outputs[0].dtype if call.outputs else ""
        finding = self._account.operators.setdefault(
            (call.operator, dtype),
            OperatorFinding(
                operator=call.operator,
                tensor="all outputs",
                operator_class=self._standards.class_of(call.operator),
                dtype=dtype,
                threshold="the distance of its outputs, in the l2 norm, is explained by rounding "
                "and by the distance of its inputs",
            ),
        )
        finding.calls += 1
        errors = finding.errors
        errors.max_rel = max(errors.max_rel, found.output)
        errors.worst_share_of_threshold = max(errors.worst_share_of_threshold, found.excess)
        return finding

    def _place(self, call: CallRecord) -> Place:
        return call.place(self._ours.manifest.rank, self._step)

    def _where(self, call: CallRecord) -> Where:
        return Where.of(self._place(call))


def _measured(found: Closeness) -> str:
    if found.inputs == 0:
        inputs = "its inputs agreed bit for bit"
    else:
        inputs = f"its inputs agreed to {found.inputs:.1e}"
    if found.output == inf:
        return f"{found.tensor} differs in shape or in its NaN and inf; {inputs}"
    return f"relative error {found.output:.1e}, allowed {found.allowed:.1e}; {inputs}"


def _shapes(call: CallRecord) -> str:
    return ", ".join(str(use.shape) for use in call.inputs)


def _findings(account: _Account, ours: _Ranks, theirs: _Ranks) -> Findings:
    first = account.departures[0] if account.departures else None
    rank = first.where.rank if first else min(theirs)
    run, reference = theirs[rank].manifest, next(iter(ours.values())).manifest
    steps = {step for each in ours.values() for step in each.steps} & {
        step for each in theirs.values() for step in each.steps
    }
    unlike = first is None and account.too_far > account.calls / 2
    return Findings(
        tool="depart",
        rank=rank,
        device=run.device,
        chip=run.chip,
        reference=f"{reference.chip} ({reference.device})",
        steps=len(steps),
        passed=first is None and not unlike,
        summary=_summary(account, first, len(steps), unlike),
        operators=[account.operators[key] for key in sorted(account.operators)],
        first_bad=first.where if first else None,
        first_bad_reason=first.reason if first else "",
        notes=_notes(account, ours, theirs),
    )


def _summary(account: _Account, first: _Departure | None, steps: int, unlike: bool) -> str:
    if first:
        return f"first departs at {_describe(first.where)}: {first.reason}"
    if unlike:
        return (
            f"the runs have little in common: the inputs of {account.too_far} of {account.calls} "
            "calls differ too much to judge; give both the same weights, data and seed"
        )
    return (
        f"does not depart in {account.calls} calls of {steps} steps; outputs are at most "
        f"{account.furthest:.1e} apart"
    )


def _describe(where: Where) -> str:
    source = f" ({where.source})" if where.source else ""
    module = where.module or "the program"
    return f"{module}, {where.operator} #{where.index}, step {where.step}, {where.phase}{source}"


def _notes(account: _Account, ours: _Ranks, theirs: _Ranks) -> list[str]:
    notes = [
        f"{title}: " + ", ".join(f"{name} ({count})" for name, count in counted.most_common())
        for title, counted in {
            "calls of the reference without a counterpart": account.only_ours,
            "calls of the other run without a counterpart": account.only_theirs,
            "calls that may differ (random numbers, messages), and do": +account.not_judged,
        }.items()
        if counted
    ]
    notes += [
        f"step {each.where.step}, rank {each.where.rank}: departs at {_describe(each.where)}: "
        f"{each.reason}"
        for each in account.departures[1:_MOST_NOTES]
    ]
    if account.too_far:
        notes.append(
            f"{account.too_far} of {account.calls} calls were not judged: their inputs had drifted "
            f"apart by more than {1 / GAIN:.0%}"
        )
    for name, run in {"the reference": ours, "the other run": theirs}.items():
        for each in run.values():
            notes += [f"{name}: {note}" for note in each.manifest.left_out.notes()]
    if missing := sorted(ours.keys() ^ theirs.keys()):
        notes.append(f"ranks in one run only: {missing}")
    return notes
