"""Fallback: chosen operators run on the host instead of the chip."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from ditorch.precision.call import Call
from ditorch.precision.results import Findings, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.substitution import refuse_communication, run_elsewhere, with_arguments
from ditorch.precision.tensors import (
    chip_of,
    has_to_stay,
    inputs,
    is_communication,
    is_random,
    to_host,
)
from ditorch.precision.tool import Proceed, Tool, new_findings

DROPOUT = "aten.native_dropout.default"


class Fallback(Tool):
    """Runs the selected operators on the host, from copies of their inputs.

    Forward and backward operators alike, in-place and `out=` ones too: what they write reaches the
    chip's tensors. Views and operators that only make memory compute nothing and stay on the chip.

    Random operators draw the chip's own numbers where its generator has the host's form (an
    emulated chip's has), else from a seed drawn on the chip: they follow `torch.manual_seed`, and
    leave the host's generator as it was. Dropout drops the elements that the chip drops.

    Args:
        operators: Names, or shell patterns of them, which are required; "*" is every operator but
            communication.
        output: The folder for the findings, a file for each rank; without it none are written.

    Raises:
        ValueError: no operators are named.
        RuntimeError: in the program, where a named operator communicates.
    """

    rank_in_line: ClassVar[int] = 60

    def __init__(self, *, output: Path | None = None, **selection: Unpack[Selection]) -> None:
        super().__init__(**selection)
        if not self.select.operators:
            raise ValueError('operators is missing, expected names or patterns ("*" for all)')
        self.output = output
        self._runs: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, call: Call, proceed: Proceed) -> Any:
        refuse_communication(call, self.select, "Fallback")
        chip = chip_of(call)
        if chip is None or is_communication(call) or has_to_stay(call) or _moves(call, chip):
            return proceed(call)
        with self._lock:
            self._runs[call.operator] += 1
        return run_on_host(call, proceed, chip)

    def findings(self) -> Findings:
        """`fallbacks` counts the runs on the host by operator."""
        runs = dict(self._runs.most_common())
        summary = f"{sum(runs.values())} calls of {len(runs)} operators ran on the host"
        notes = [] if runs else ["no call on the chip matched; views and copies stay on the chip"]
        return new_findings("fallback", summary=summary, fallbacks=runs, notes=notes)

    def closed(self) -> None:
        if self.output is not None:
            write_findings(self.findings(), self.output)


def run_on_host(call: Call, proceed: Proceed, chip: torch.device) -> Any:
    """The call's result on the chip, computed by the host's kernels."""
    if call.operator == DROPOUT:
        return _dropout(call, proceed)
    with _numbers_of(call, chip) as generator:

        def for_host(name: str, value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return generator
            return torch.device("cpu") if isinstance(value, torch.device) else value

        # Beyond this point the arguments are the host's, so the result's place is as well.
        return run_elsewhere(
            with_arguments(call, for_host), proceed, to_host, lambda result: result.to(chip)
        )


def _dropout(call: Call, proceed: Proceed) -> tuple[torch.Tensor, torch.Tensor]:
    """The host's product with the mask that the chip draws, by numbers that only it has."""
    found, mask = proceed(call)
    values, share, trains = call.args
    factor = 1.0 if trains is False else 0.0 if share == 1 else 1 / (1 - share)
    return to_host(values).mul(to_host(mask)).mul_(factor).to(found.device), mask


def _moves(call: Call, chip: torch.device) -> bool:
    """Whether the call moves elements between host and chip, as a fallback would itself."""
    if call.operator.rpartition(".")[0] not in ("aten._to_copy", "aten.copy_"):
        return False
    types = {tensor.device.type for _, tensor in inputs(call)}
    if asked := call.kwargs.get("device"):
        types.add(asked.type)
    return len(types) > 1


@contextmanager
def _numbers_of(call: Call, chip: torch.device) -> Iterator[torch.Generator]:
    """A host generator that stands in for the chip's, explicit or default, while the call runs."""
    host = torch.default_generator
    if not is_random(call):
        yield host
        return
    values = (*call.args, *call.kwargs.values())
    given = next((value for value in values if isinstance(value, torch.Generator)), None)
    module = torch.get_device_module(chip)
    state = given.get_state() if given else module.get_rng_state(chip)
    before = host.get_state()
    same_form = state.numel() == before.numel()
    if same_form:
        host.set_state(state)
    else:
        seed = torch.randint(2**62, (), device=chip, generator=given)
        host.manual_seed(int(seed))
    try:
        yield host
    finally:
        if same_form and given:
            given.set_state(host.get_state())
        elif same_form:
            module.set_rng_state(host.get_state(), chip)
        host.set_state(before)
