"""Observe: which operators a script calls, where, in which dtypes and how often."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Unpack

from ditorch.precision.call import Call
from ditorch.precision.place import Place
from ditorch.precision.results import Findings, Observed, Where, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.tensors import inputs, named_tensors
from ditorch.precision.tool import Proceed, Tool, new_findings

_Kind = tuple[str, str, str]  # operator, module, phase


class Observe(Tool):
    """Counts the selected calls by operator, module and phase. It copies and reads no tensor.

    Args:
        output: The folder for the findings, a file for each rank; without it none are written.
    """

    rank_in_line: ClassVar[int] = 35

    def __init__(self, *, output: Path | None = None, **selection: Unpack[Selection]) -> None:
        super().__init__(**selection)
        self.output = output
        self._first: dict[_Kind, Place] = {}
        self._calls: Counter[_Kind] = Counter()
        self._dtypes: dict[_Kind, set[str]] = {}
        self._lock = threading.Lock()

    def around(self, call: Call, proceed: Proceed) -> Any:
        result = proceed(call)
        seen = (*inputs(call), *named_tensors(result, "out"))
        dtypes = {str(tensor.dtype).removeprefix("torch.") for _, tensor in seen}
        kind = (call.operator, call.place.module, call.place.phase)
        with self._lock:
            self._first.setdefault(kind, call.place)
            self._calls[kind] += 1
            self._dtypes.setdefault(kind, set()).update(dtypes)
        return result

    def findings(self) -> Findings:
        """`observed` in the order of first calls."""
        with self._lock:
            observed = [
                Observed(
                    first=Where.of(place), calls=self._calls[k], dtypes=sorted(self._dtypes[k])
                )
                for k, place in self._first.items()
            ]
        operators = {each.first.operator for each in observed}
        summary = f"{sum(each.calls for each in observed)} calls of {len(operators)} operators"
        return new_findings("observe", summary=summary, observed=observed)

    def closed(self) -> None:
        if self.output is not None:
            write_findings(self.findings(), self.output)
