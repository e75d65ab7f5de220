"""What every precision tool is: a context manager around each operator call.

One dispatch mode below autograd sees forward and backward operators, those called through names
imported from torch, and every thread of the autograd engine (which takes the caller's modes along).
The tools that are open form a line around each call, in the order of `rank_in_line` whatever the
order they were entered in: those that look on stand outside those that change how it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Self, Unpack

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ditorch
from ditorch.precision import place
from ditorch.precision.call import Call
from ditorch.precision.results import Findings
from ditorch.precision.select import Select, Selection

Proceed = Callable[[Call], Any]

_NAMESPACES_SKIPPED = ("profiler", "prim", "prims")
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl  # of plain tensors and parameters


class Tool:
    """Base of the tools: `operators`, `modules`, `ranks` and `steps` say which calls it sees."""

    rank_in_line: ClassVar[int]  # 0 stands outermost
    sees_calls: ClassVar[bool] = True  # where no open tool does, calls are as fast as without tools

    def __init__(self, **selection: Unpack[Selection]) -> None:
        self.select = Select.of(**selection)

    def around(self, call: Call, proceed: Proceed) -> Any:
        """Runs one selected call, by `proceed(call)`, and returns its result."""
        raise NotImplementedError

    def opened(self) -> None:
        """The tool is about to see calls."""

    def closed(self) -> None:
        """The tool sees no more calls; files are written here."""

    def findings(self) -> Findings:
        """What the tool has found so far; may be called at any time."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.opened()
        _line.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _line.remove(self)
        self.closed()


def new_findings(tool: str, **fields: Any) -> Findings:
    """Findings of this process: its rank, device, chip and the steps it has taken so far."""
    chip = ditorch.chip()
    return Findings(
        tool=tool,
        rank=place.rank(),
        device=str(ditorch.device),
        chip=f"{chip.vendor}, {chip.chip_type}",
        steps=place.step(),
        **fields,
    )


class _Line:
    """The open tools of the process, outermost first, and each thread's dispatch mode."""

    def __init__(self) -> None:
        self.tools: tuple[Tool, ...] = ()
        self._watch = place.Watch()
        self._lock = threading.Lock()
        self._thread = threading.local()

    def add(self, tool: Tool) -> None:
        with self._lock:
            if not self.tools:
                self._watch.start()
            self.tools = tuple(sorted((*self.tools, tool), key=lambda each: each.rank_in_line))
        if not tool.sees_calls:
            return
        depth = getattr(self._thread, "depth", 0)
        if depth == 0:
            self._thread.modes = (place.functions(), _Dispatch())
            for mode in self._thread.modes:
                mode.__enter__()
        self._thread.depth = depth + 1

    def remove(self, tool: Tool) -> None:
        if (
            tool.sees_calls and getattr(self._thread, "depth", 0) > 0
        ):  # else another thread opened it
            self._thread.depth -= 1
            if self._thread.depth == 0:
                for mode in reversed(self._thread.modes):
                    mode.__exit__(None, None, None)
        with self._lock:
            self.tools = tuple(each for each in self.tools if each is not tool)
            if not self.tools:
                self._watch.stop()


class _Dispatch(TorchDispatchMode):
    """Leads every operator call through the line. Torch switches it off for what tools call."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES_SKIPPED or FakeTensor in types:  # which compute nothing
            return func(*args, **kwargs)
        if not all(map(_is_plain, types)):
            return NotImplemented  # a DTensor, say: what it does with plain tensors comes here
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        call = Call(func, args, kwargs, place.place_of(str(func)))
        tools = [tool for tool in _line.tools if tool.select.matches(call.place)]
        return _pass(tools, 0, call)


@cache
def _is_plain(tensor_type: Any) -> bool:
    """Whether tensors of the type are only memory: some plugins write those of theirs in Python."""
    if tensor_type.__torch_dispatch__ is _NO_DISPATCH:
        return True
    return tensor_type is type(torch.empty(0, device=ditorch.device))


@cache
def _is_composite(func: OpOverload) -> bool:
    """Whether the operator only calls others: autograd takes it apart, inference mode does not."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not any(
        has_kernel(func.name(), key) for key in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")
    )


def _pass(tools: list[Tool], position: int, call: Call) -> Any:
    if position == len(tools):
        return call.func(*call.args, **call.kwargs)
    return tools[position].around(call, lambda inner: _pass(tools, position + 1, inner))


_line = _Line()
