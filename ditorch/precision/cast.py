"""Cast: chosen operators run in another dtype."""

from __future__ import annotations

import threading
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ditorch.precision.call import Call
from ditorch.precision.results import Findings, OperatorFinding, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.substitution import refuse_communication, run_elsewhere, with_arguments
from ditorch.precision.tensors import has_to_stay, inputs, is_communication, map_tensors
from ditorch.precision.tool import Proceed, Tool, new_findings

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEXES = (torch.complex32, torch.complex64, torch.complex128)


class Cast(Tool):
    """Runs the selected operators in another floating dtype, forward and backward.

    Floating and complex inputs are cast to `dtype` (complex ones to the complex dtype made of it),
    results are cast back to the dtypes the operator would have given, and what it writes is written
    into the tensors it was given. Views and operators that only make memory are left alone.

    Args:
        operators: Names, or shell patterns of them, which are required; "*" is every operator but
            communication.
        dtype: The dtype to compute in.
        output: The folder for the findings, a file for each rank; without it none are written.

    Raises:
        ValueError: no operators are named, or there is no such dtype.
        RuntimeError: in the program, where a named operator communicates.
    """

    rank_in_line: ClassVar[int] = 50

    def __init__(
        self,
        *,
        dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32",
        output: Path | None = None,
        **selection: Unpack[Selection],
    ) -> None:
        super().__init__(**selection)
        if not self.select.operators:
            raise ValueError('operators is missing, expected names or patterns ("*" for all)')
        self.output = output
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or found not in _FLOATS:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(map(str, _FLOATS))}")
        self.dtype = found
        self._calls: Counter[tuple[str, str]] = Counter()
        self._expected: dict[Any, Any] = {}  # dtypes of results, by what decides them
        self._lock = threading.Lock()

    def around(self, call: Call, proceed: Proceed) -> Any:
        refuse_communication(call, self.select, "Cast")
        if is_communication(call) or has_to_stay(call):
            return proceed(call)
        given = _dtypes(call)
        if all(self._counterpart(dtype) == dtype for dtype in given):
            return proceed(call)
        with self._lock:
            self._calls[call.operator, _name(_widest(given))] += 1
        expected = self._expected_dtypes(call)
        cast = with_arguments(call, self._cast_argument)
        results = run_elsewhere(cast, proceed, self._cast, lambda result: result)
        if expected is None:
            return map_tensors(results, lambda r: r.to(_widest(given)) if _is_float(r) else r)
        return _in_dtypes(results, expected)

    def findings(self) -> Findings:
        """`operators` counts the cast calls by operator and the dtype it would have run in."""
        operators = [
            OperatorFinding(operator=operator, dtype=dtype, calls=calls)
            for (operator, dtype), calls in self._calls.most_common()
        ]
        calls = sum(self._calls.values())
        summary = f"{calls} calls of {len({o.operator for o in operators})} operators ran in "
        return new_findings("cast", summary=summary + _name(self.dtype), operators=operators)

    def closed(self) -> None:
        if self.output is not None:
            write_findings(self.findings(), self.output)

    def _expected_dtypes(self, call: Call) -> Any:
        """`_results_dtypes`, found once for calls alike; how many results a list has may differ."""
        if any(isinstance(each.type, torch.ListType) for each in call.func._schema.returns):
            return _results_dtypes(call)
        key = (call.func, _kind(call.args), _kind(call.kwargs))
        if key not in self._expected:
            self._expected[key] = _results_dtypes(call)
        return self._expected[key]

    def _counterpart(self, dtype: torch.dtype) -> torch.dtype:
        if dtype in _FLOATS:
            return self.dtype
        return self.dtype.to_complex() if dtype in _COMPLEXES else dtype

    def _cast(self, tensor: Tensor) -> Tensor:
        dtype = self._counterpart(tensor.dtype)
        return tensor if dtype == tensor.dtype else tensor.detach().to(dtype)

    def _cast_argument(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._counterpart(value)
        # The softmax that widens its input refuses an input that is wide already.
        return False if name == "half_to_float" else value


def _dtypes(call: Call) -> list[torch.dtype]:
    """Floating and complex dtypes of the call's tensors, and those it asks for by argument."""
    asked = [value for value in (*call.args, *call.kwargs.values()) if type(value) is torch.dtype]
    every = [tensor.dtype for _, tensor in inputs(call)] + asked
    return [dtype for dtype in every if dtype in _FLOATS + _COMPLEXES]


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _kind(value: Any) -> Any:
    """What of an argument can decide the results' dtypes."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(_kind(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _kind(each)) for name, each in value.items())
    return value if isinstance(value, (bool, str, torch.dtype)) else type(value)


def _results_dtypes(call: Call) -> Any:
    """The results' dtypes had the call not been cast, in the results' own nest.

    None where torch cannot tell without computing, because their shapes depend on the elements.
    """

    def stand_in(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    try:
        with FakeTensorMode():
            args, kwargs = map_tensors((call.args, call.kwargs), stand_in)
            return _dtypes_of(call.func(*args, **kwargs))
    except (RuntimeError, NotImplementedError):
        return None


def _dtypes_of(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_dtypes_of(value) for value in values]
    return values.dtype if isinstance(values, Tensor) else None


def _in_dtypes(values: Any, dtypes: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_in_dtypes(*pair) for pair in zip(values, dtypes, strict=True))
    return values if dtypes is None or values.dtype == dtypes else values.to(dtypes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
