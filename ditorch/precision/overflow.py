"""FindOverflow: the operator that first makes inf, nan or too large values out of clean ones."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.place import Place
from ditorch.precision.results import Findings, Overflow, Where, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.tensors import (
    has_to_stay,
    is_communication,
    named_tensors,
    read_tensors,
    written_names,
    written_tensors,
)
from ditorch.precision.tool import Proceed, Tool, new_findings

_MOST_OVERFLOWS = 1000  # kept; the first ones are those that tell
_POINT_TO_POINT = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")

Named = list[tuple[str, Tensor]]


class _State(IntEnum):
    """How bad the worst element of some tensors is."""

    clean = 0
    out_of_range = 1
    inf = 2
    nan = 3


@dataclass(frozen=True)
class _Seen:
    state: _State
    largest: float  # in magnitude, of the finite values or inf or nan


@dataclass(frozen=True, eq=False)
class _Pending:
    """A transfer whose buffers may not be looked at yet."""

    place: Place
    outputs: Named
    work: Any


class FindOverflow(Tool):
    """Reports every operator that makes NaN, infinity or values out of range from better inputs.

    An operator made a nan if none of its arguments had one, an inf if all of them were finite, and
    a value out of range (beyond the largest finite one of `range_dtype`) if all were in range. The
    numbers among its arguments count: filling a mask with -inf is legal, log(0) is reported, and so
    is the softmax of a row that is -inf throughout. Uninitialized memory that an operator only
    overwrites does not count.

    Collective operators are waited for as soon as they are called, and looked at in place; what a
    message brought is looked at once it has arrived. A communication operator is reported where
    this rank's own part was clean: another rank's was not, or the sum overflowed
    (`first_of_all_ranks` tells which).

    Each call costs a pass over its results and reads two numbers back from the chip.

    Args:
        range_dtype: Also reports values beyond the largest finite one of this dtype.
        output: The folder for the findings, a file for each rank; without it none are written.

    Raises:
        ValueError: there is no such dtype of a range.
    """

    rank_in_line: ClassVar[int] = 30

    def __init__(
        self,
        *,
        range_dtype: Literal["float16", "bfloat16", "float32"] | None = None,
        output: Path | None = None,
        **selection: Unpack[Selection],
    ) -> None:
        super().__init__(**selection)
        if range_dtype not in (None, "float16", "bfloat16", "float32"):
            raise ValueError(
                f"range_dtype is {range_dtype!r}, expected float16, bfloat16 or float32"
            )
        self.output = output
        self.range_dtype = range_dtype
        self._limit = torch.finfo(getattr(torch, range_dtype)).max if range_dtype else math.inf
        self._overflows: list[Overflow] = []
        self._calls = 0
        self._dropped = 0
        self._pending: list[_Pending] = []
        self._launched: dict[int, tuple[Place, _Seen]] = {}  # by the memory being filled
        self._lock = threading.Lock()

    def around(self, call: Call, proceed: Proceed) -> Any:
        self._look_at_arrived()
        if has_to_stay(call):
            return proceed(call)
        with self._lock:
            self._calls += 1
        if call.func.namespace == "_c10d_functional":
            return self._around_functional(call, proceed)
        written = written_names(call)
        read = read_tensors(call)
        lost = [(name, tensor) for name, tensor in read if name.split(".")[0] in written]
        before = self._look(lost)
        results = proceed(call)
        outputs = _outputs(call, results)
        if is_communication(call):
            work = _work(results)
            if call.func._schema.name in _POINT_TO_POINT:
                if outputs:
                    self._pending.append(_Pending(call.place, outputs, work))
                return results
            if work is not None and outputs:
                work.wait()
        if self._look(outputs).state > before.state:
            kept = [each for each in read if each not in lost]
            arguments = _worst([before, self._look(kept), self._look_at_numbers(call)])
            self._report(call.place, outputs, arguments)
        return results

    def findings(self) -> Findings:
        """`overflows` in the order found; the first one is `first_bad`."""
        self._look_at_arrived()
        first = self._overflows[0] if self._overflows else None
        fields: dict[str, Any] = {"passed": True, "summary": f"no overflow in {self._calls} calls"}
        if first is not None:
            fields["passed"] = False
            fields["first_bad"] = first.where
            fields["first_bad_reason"] = describe(first)
            fields["summary"] = f"first overflow: {describe(first)}"
        notes = []
        if self._dropped:
            notes.append(f"{self._dropped} later overflows were not kept")
        if self._pending:
            notes.append(f"{len(self._pending)} messages had not arrived and were not looked at")
        overflows = list(self._overflows)
        return new_findings("overflow", overflows=overflows, notes=notes, **fields)

    def closed(self) -> None:
        if self.output is not None:
            write_findings(self.findings(), self.output)

    def _around_functional(self, call: Call, proceed: Proceed) -> Any:
        """Collectives of traced programs: their results may be looked at after `wait_tensor`."""
        if call.func._schema.name == "_c10d_functional::wait_tensor":
            results = proceed(call)
            place, given = self._launched.pop(results.data_ptr(), (call.place, None))
            if given is not None:
                self._report(place, [("out", results)], given)
            return results
        given = self._look(read_tensors(call))
        results = proceed(call)
        for _, tensor in named_tensors(results, "out"):
            if type(tensor) is Tensor and tensor.numel():
                self._launched[tensor.data_ptr()] = (call.place, given)
        return results

    def _look_at_arrived(self) -> None:
        if not self._pending:
            return
        with self._lock:
            arrived = [each for each in self._pending if each.work.is_completed()]
            self._pending = [each for each in self._pending if each not in arrived]
        for each in arrived:
            self._report(each.place, each.outputs, _Seen(_State.clean, 0.0))

    def _report(self, place: Place, outputs: Named, given: _Seen) -> None:
        for name, tensor in outputs:
            seen = self._look([(name, tensor)])
            if seen.state <= given.state:
                continue
            overflow = Overflow(
                where=Where.of(place),
                tensor=name,
                kind=_KINDS[seen.state],
                elements=self._count(tensor, seen.state),
                largest_input=given.largest,
            )
            with self._lock:
                if len(self._overflows) < _MOST_OVERFLOWS:
                    self._overflows.append(overflow)
                else:
                    self._dropped += 1

    def _look(self, tensors: Named) -> _Seen:
        """The worst of all elements, in one pass over each tensor."""
        values = (_real_values(tensor) for _, tensor in tensors)
        extremes = (each for value in values if value is not None for each in torch.aminmax(value))
        return self._judge(float(each) for each in extremes)

    def _look_at_numbers(self, call: Call) -> _Seen:
        return self._judge(_numbers(call))

    def _judge(self, numbers: Iterable[float]) -> _Seen:
        state, largest = _State.clean, 0.0
        for number in numbers:
            size = abs(number)
            if math.isnan(size):
                return _Seen(_State.nan, math.nan)
            largest = max(largest, size)
        if math.isinf(largest):
            state = _State.inf
        elif largest > self._limit:
            state = _State.out_of_range
        return _Seen(state, largest)

    def _count(self, tensor: Tensor, state: _State) -> int:
        values = _real_values(tensor)
        if values is None:
            return 0
        if state is _State.out_of_range:
            return int((values.abs() > self._limit).sum())
        return int((values.isnan() if state is _State.nan else values.isinf()).sum())


_KINDS: dict[_State, Literal["nan", "inf", "out of range"]] = {
    _State.out_of_range: "out of range",
    _State.inf: "inf",
    _State.nan: "nan",
}


def describe(overflow: Overflow) -> str:
    """One sentence: what the operator made, of what, and where."""
    where = overflow.where
    made = f"{overflow.elements} {overflow.kind} in {overflow.tensor}"
    if where.operator.startswith("c10d.") or where.operator.startswith("_c10d"):
        cause = "another rank's part was not clean, or the sum overflowed"
    elif overflow.kind == "nan":
        cause = "none of its arguments had a nan"
    else:
        cause = f"its arguments were at most {overflow.largest_input:g} in magnitude"
    return (
        f"{where.operator} #{where.index} gave {made} in the {where.phase} of "
        f"{where.module or 'the program'} ({where.source or 'no source line'}, rank {where.rank}, "
        f"step {where.step}); {cause}"
    )


def first_of_all_ranks(findings: Sequence[Findings]) -> Overflow | None:
    """The overflow that the others follow from, of one run's findings on all its ranks.

    The earliest step counts, and in it what a rank computed before what it only received.
    """
    firsts = [each.overflows[0] for each in findings if each.overflows]
    return min(
        firsts, key=lambda o: (o.where.step, "c10d" in o.where.operator, o.where.rank), default=None
    )


def _outputs(call: Call, results: Any) -> Named:
    written = written_tensors(call)
    known = {id(tensor) for _, tensor in written}
    return written + [each for each in named_tensors(results, "out") if id(each[1]) not in known]


def _work(results: Any) -> Any:
    last = results[-1] if isinstance(results, tuple) and results else results
    if not isinstance(last, torch.ScriptObject):
        return None
    return torch._C._distributed_c10d.Work.unbox(last)


def _real_values(tensor: Tensor) -> Tensor | None:
    """The tensor's elements as floating numbers that can be compared; None if it has none."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    if not tensor.is_floating_point():
        return None
    return tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()


def _numbers(call: Call) -> Iterator[float]:
    """The call's arguments that are numbers to compute with, not sizes or indices."""
    for position, argument in enumerate(call.func._schema.arguments):
        value = call.kwargs.get(argument.name)
        if position < len(call.args):
            value = call.args[position]
        if value is None or not {"number", "float"} & set(re.split(r"\W", str(argument.type))):
            continue
        for number in value if isinstance(value, (list, tuple)) else (value,):
            yield abs(number)


def _worst(seen: Sequence[_Seen]) -> _Seen:
    return max(seen, key=lambda each: (each.state, each.largest))
