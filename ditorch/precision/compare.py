"""Compare: every operator against a reference of higher precision, from the same inputs.

    with Compare(modules="layers.3*", steps="0:10") as compare:
        train()
    print(compare.findings().summary)

The chip's own inputs are copied before a call; the host computes the truth from the copies, in
float64. Every result and every argument that is written is judged by the standards; arguments that
are not written have to be the same, bit for bit, after the call.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

import ditorch
from ditorch._ditorch import host_runs_here
from ditorch.precision.call import Call
from ditorch.precision.comparisons import Comparisons
from ditorch.precision.copies import outputs
from ditorch.precision.reference import Reference, random_state, reference_of
from ditorch.precision.results import Errors, Findings, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.standards import load_standards
from ditorch.precision.tensors import (
    chip_of,
    has_to_stay,
    inputs,
    is_communication,
    is_view,
    map_tensors,
    named_tensors,
    to_host,
    written_names,
)
from ditorch.precision.tool import Proceed, Tool, new_findings
from ditorch.precision.verdict import Judgement


class PrecisionError(RuntimeError):
    """An operator is not as precise as the standards ask; the message names it and its place."""


class Compare(Tool):
    """Judges the selected operators as the program runs; results are the chip's, untouched.

    Args:
        output: The folder for the findings, a file for each rank; without it none are written.
        standards: A team's own file, whose numbers replace those of the built-in standards.
        every: Compares one call in so many of each operator, the first among them.
        on_failure: "record" goes on when an operator fails; "raise" stops the program at the first.

    Raises:
        ValueError: an argument or the file of standards is wrong.
        PrecisionError: in the program, at the first failure, if asked for.
    """

    # Within those whose own passes over tensors may run on the host: they are not the call's.
    rank_in_line: ClassVar[int] = 36

    def __init__(
        self,
        *,
        output: Path | None = None,
        standards: Path | None = None,
        every: int = 1,
        on_failure: Literal["record", "raise"] = "record",
        **selection: Unpack[Selection],
    ) -> None:
        super().__init__(**selection)
        if every < 1:
            raise ValueError(f"every is {every}, expected at least 1")
        if on_failure not in ("record", "raise"):
            raise ValueError(f'on_failure is {on_failure!r}, expected "record" or "raise"')
        self.output = output
        self.standards = load_standards(standards)
        self.every = every
        self.on_failure = on_failure
        self._comparisons = Comparisons(self.standards)
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, call: Call, proceed: Proceed) -> Any:
        if is_view(call):
            return self._around_view(call, proceed)
        if not self._is_due(call):
            return proceed(call)
        if not all(_is_plain(each) for _, each in inputs(call)):
            return self._around_unlike(call, proceed)
        copied, numbers = _copied(call), random_state(call)
        runs = host_runs_here()
        results = proceed(call)
        ran_on_host = host_runs_here() > runs
        actual = [(name, to_host(each)) for name, each in outputs(call, results) if _is_plain(each)]
        mutated = _mutated(call, copied)
        reference = reference_of(copied, self.standards, numbers)
        judged = [
            (name, each, reference.judge(name, each, self.standards))
            for name, each in actual
            if name in reference.tensors
        ]
        note = reference.note or _left_out(actual, reference)
        with self._lock:
            self._comparisons.add_call(call, judged, mutated, ran_on_host, note)
        self._stop_if_failed(call, [judgement for _, _, judgement in judged], mutated)
        return results

    def findings(self) -> Findings:
        """`operators`, and `first_bad`: the first call in time that failed."""
        with self._lock:
            return new_findings("compare", reference="cpu float64", **self._comparisons.fields())

    def closed(self) -> None:
        if self.output is not None:
            write_findings(self.findings(), self.output)

    def _around_view(self, call: Call, proceed: Proceed) -> Any:
        """A view computes nothing, but it has to be one: writes to it reach the argument."""
        results = proceed(call)
        shown = {each.untyped_storage()._cdata for _, each in inputs(call) if _is_plain(each)}
        copies = [
            name
            for name, each in named_tensors(results, "out")
            if _is_plain(each) and each.untyped_storage()._cdata not in shown
        ]
        if copies and shown:
            reason = f"{copies[0]} is a copy, expected a view of the argument's memory"
            judgement = Judgement(False, reason, Errors(), "the same memory", "bitwise")
            first = dict(named_tensors(results, "out"))[copies[0]]
            with self._lock:
                self._comparisons.add_call(call, [(copies[0], first, judgement)], [], False, "")
            self._stop_if_failed(call, [judgement], [])
        return results

    def _around_unlike(self, call: Call, proceed: Proceed) -> Any:
        with self._lock:
            self._comparisons.add_call(call, [], [], False, "it has sparse or quantized arguments")
        return proceed(call)

    def _is_due(self, call: Call) -> bool:
        on_chip = ditorch.device.type == "cpu" or chip_of(call) is not None
        if not on_chip or has_to_stay(call) or is_communication(call):
            return False
        with self._lock:
            self._seen[call.operator] += 1
            return (self._seen[call.operator] - 1) % self.every == 0

    def _stop_if_failed(self, call: Call, judged: list[Judgement], mutated: list[str]) -> None:
        if self.on_failure != "raise":
            return
        for judgement in judged:
            if not judgement.passed:
                raise PrecisionError(f"{call.place}: {judgement.reason}")
        if mutated:
            raise PrecisionError(f"{call.place}: it changed its input {mutated[0]}")


def _left_out(actual: list[tuple[str, Tensor]], reference: Reference) -> str:
    names = [name for name, _ in actual if name not in reference.tensors]
    return f"nothing says what {', '.join(names)} ought to be" if names else ""


def _copied(call: Call) -> Call:
    """The call with copies in host memory of what it was given."""
    args, kwargs = map_tensors((call.args, call.kwargs), to_host)
    return replace(call, args=args, kwargs=kwargs)


def _mutated(call: Call, copied: Call) -> list[str]:
    """The arguments that changed though the operator does not write them."""
    names = written_names(call)
    pairs = list(zip(inputs(call), inputs(copied), strict=True))
    shared = {
        each.untyped_storage()._cdata for (name, each), _ in pairs if name.split(".")[0] in names
    }
    return [
        name
        for (name, now), (_, before) in pairs
        if now.untyped_storage()._cdata not in shared and not _same_bits(to_host(now), before)
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
