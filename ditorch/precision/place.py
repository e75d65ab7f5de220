"""Where in the program an operator was called: rank, step, phase, module, function, source line.

Torch tells all of it without touching the user's code: hooks on every module say which one runs,
hooks on every optimizer count the steps, a function mode names the Python function, the stack has
the source line, and autograd's sequence numbers lead from a backward operator to the forward call
it belongs to. (Nodes made while a reentrant checkpoint recomputes are not followed.)
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import checkpoint

Phase = Literal["forward", "recompute", "backward", "optimizer"]

_LIBRARIES = tuple(
    str(Path(path).parent) + os.sep
    for path in (torch.__file__, Path(__file__).parent)  # torch/ and ditorch/
)
_PARALLEL = ("DistributedDataParallel", "DataParallel")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_EXAMPLE = str(Path(__file__).parents[1] / "align" / "example.py")  # a script like a user's
_MOST_NODES = 1_000_000  # of a graph whose backward never comes


@dataclass(frozen=True, slots=True)
class Place:
    """Two runs of one program call the same operator at equal `key`s."""

    rank: int
    step: int
    phase: Phase
    module: str  # qualified name, "layers.3.attention"; "" outside the modules of the model
    operator: str  # "aten.mm.default"
    index: int  # counts the calls of this operator at this rank, step, phase and module
    function: str  # the Python function the user called, "torch.nn.functional.linear"
    source: str  # the user's line, "model.py:42 in forward"

    @property
    def key(self) -> tuple[int, int, str, str, str, int]:
        return (self.rank, self.step, self.phase, self.module, self.operator, self.index)

    def __str__(self) -> str:
        where = f"{self.phase} of {self.module or 'the program'}, {self.source or 'no source line'}"
        return f"{self.operator} #{self.index} (rank {self.rank}, step {self.step}, {where})"


class _Thread(threading.local):
    """What the calling thread is doing."""

    def __init__(self) -> None:
        self.modules: list[str] = []  # being run, the outermost first
        self.outermost: nn.Module
        self.function = ""
        self.in_optimizer = False


@dataclass(frozen=True, slots=True)
class _Origin:
    """The forward call behind an autograd node."""

    module: str
    function: str
    source: str


class _Functions(TorchFunctionMode):
    """Remembers the outermost torch function being called; torch hides nested ones itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = _thread.function
        _thread.function = before or _function_name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _thread.function = before


_thread = _Thread()
_origins: dict[int, _Origin] = {}  # by autograd's sequence number
_oldest_node = 0  # sequence numbers before this one belong to earlier steps
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_rank: int | None = None  # as torch.distributed gave it; it may be shut down since
_calls: Counter[tuple[str, str, str]] = Counter()
_step = 0
_optimizer_steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_lock = threading.Lock()


def step() -> int:
    """The training step, from 0: how often the busiest optimizer has stepped since `watch`."""
    return _step


def next_step() -> None:
    """Ends a training step; for programs whose optimizer is not a torch.optim.Optimizer."""
    global _step
    with _lock:
        _step += 1
        _forget_calls()


def _forget_calls() -> None:
    global _oldest_node
    _calls.clear()
    _origins.clear()
    _oldest_node = torch.autograd._get_sequence_nr()


def rank() -> int:
    """This process's rank; 0 outside distributed jobs."""
    global _rank
    if _rank is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        _rank = torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if _rank is None else _rank


def place_of(operator: str) -> Place:
    """Where the calling thread is about to call `operator`; counts the call."""
    node = torch._C._current_autograd_node()
    if _thread.in_optimizer:
        phase: Phase = "optimizer"
    elif node is None:
        phase = "forward"
    else:
        phase = "recompute" if _thread.modules or _in_checkpoint() else "backward"
    origin = _origins.get(node._sequence_nr()) if phase == "backward" else None
    if origin is None:
        module = _thread.modules[-1] if _thread.modules else ""
        origin = _Origin(module, _thread.function, _source())
        if phase == "forward":
            _remember(origin)
    with _lock:
        counted = (phase, origin.module, operator)
        index = _calls[counted]
        _calls[counted] += 1
    return Place(
        rank(), _step, phase, origin.module, operator, index, origin.function, origin.source
    )


def _remember(origin: _Origin) -> None:
    # The node of the operator being called already has its number: the last one given out. If the
    # call makes no node, that number is an earlier call's, which keeps it.
    node = torch.autograd._get_sequence_nr() - 1
    if node < _oldest_node:
        return
    if len(_origins) > _MOST_NODES:
        _origins.clear()
    _origins.setdefault(node, origin)


def _in_checkpoint() -> bool:
    """Whether autograd is running a checkpointed function again, which alone needs gradients."""
    if not torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _source() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def _is_library(filename: str) -> bool:
    if filename == _EXAMPLE:
        return False
    return filename.startswith((*_LIBRARIES, "<frozen")) or filename == "<string>"


@cache
def _short(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename


@lru_cache(maxsize=4096)
def _function_name(func: Callable[..., Any]) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


# --- hooks ------------------------------------------------------------------------------------


def _enter_module(module: nn.Module, _: Any) -> None:
    if module not in _names:
        _name_modules(_thread.outermost if _thread.modules else module)
    if not _thread.modules:
        _thread.outermost = module
    name = _names.get(module)
    if name is None:  # not registered as a child of the module that runs it
        name = f"{_thread.modules[-1]}.{type(module).__name__}"
        _names[module] = name.removeprefix(".")
    _thread.modules.append(_names[module])


def _name_modules(outermost: nn.Module) -> None:
    """Names a model and all in it; a part that ran by itself before gets its full name now."""
    above = _names.setdefault(outermost, "")
    inner: Any = outermost.module if type(outermost).__name__ in _PARALLEL else outermost
    for name, module in inner.named_modules():
        parts = (part for part in f"{above}.{name}".split(".") if part not in _WRAPPERS)
        _names[module] = ".".join(filter(None, parts))


def _leave_module(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    if _thread.modules:  # a module may be left that was entered before `watch`
        _thread.modules.pop()


def _enter_optimizer(*_: Any) -> None:
    _thread.in_optimizer = True


def _leave_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _thread.in_optimizer = False
    done = _optimizer_steps.get(optimizer, 0) + 1
    _optimizer_steps[optimizer] = done
    if done > _step:
        next_step()


class Watch:
    """Follows the program while at least one tool is active in any thread."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def start(self) -> None:
        """Steps and call counts begin at 0."""
        global _step, _rank
        _step, _rank = 0, None
        _forget_calls()
        _names.clear()
        _optimizer_steps.clear()
        _thread.modules.clear()
        _thread.in_optimizer = False  # true for ever after a step that raised
        module = nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(_enter_module),
            module.register_module_forward_hook(_leave_module, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(_enter_optimizer),
            torch_optimizer.register_optimizer_step_post_hook(_leave_optimizer),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def functions() -> TorchFunctionMode:
    """The mode that names Python functions, for the thread that enters it."""
    return _Functions()
