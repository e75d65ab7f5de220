"""The truth of an operator call: the same operator on the host, in float64, from the same inputs.

Operators that compute nothing (class "bitwise") run in their own dtype: their truth is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.copies import on_host, on_meta, run_on_host, widened
from ditorch.precision.definitions import Results, Run, argument, definition_of
from ditorch.precision.results import Errors
from ditorch.precision.scale import (
    is_rounded_once,
    scale_from_definition,
    scale_of_terms,
    sensitivity,
)
from ditorch.precision.standards import Standards, operator_names
from ditorch.precision.tensors import chip_of, dropout_of, inputs, is_communication, is_random
from ditorch.precision.verdict import Judgement, judge

Selected = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """The truth of one result or written argument."""

    value: Tensor  # float64, complex128 or exact, in host memory
    dtype: torch.dtype | None  # that the chip's tensor ought to have; None if torch cannot tell
    scale: Tensor | None = None
    reduction_length: int = 1
    added: Tensor | None = None  # see `judge`
    is_saved: bool = False  # for backward: each chip chooses the dtype
    selected: Selected | None = None  # for indices: `value` is what they select


@dataclass(frozen=True, slots=True)
class Reference:
    """The truth of a call's results, by the names of `named_tensors(result, "out")`, and of the
    arguments it writes, by the names of `written_tensors`."""

    operator: str
    tensors: dict[str, Expected] = field(default_factory=dict)
    note: str = ""  # why something is not compared, or not with float64

    def judge(
        self,
        name: str,
        actual: Tensor,
        standards: Standards,
        reference_error: Errors | None = None,
    ) -> Judgement:
        """Judges the tensor called `name`, which is in host memory, of the chip's dtype.

        Raises:
            KeyError: the reference has no such tensor.
        """
        expected = self.tensors[name]
        if expected.selected is not None and actual.dtype is torch.int64:
            try:
                actual = expected.selected(actual)
            except (IndexError, RuntimeError):
                reason = f"{name} has indices out of range, or is of another shape"
                failed = Errors(elements=actual.numel(), beyond_threshold=actual.numel())
                name_of_class = standards.class_of(self.operator)
                return Judgement(False, reason, failed, "equal", name_of_class)
        dtype = expected.dtype or actual.dtype
        if expected.selected is not None:
            dtype = expected.value.dtype
        if expected.is_saved and actual.dtype in _STATISTICS:
            dtype = actual.dtype
        return judge(
            self.operator,
            name,
            actual,
            expected.value,
            standards=standards,
            dtype=dtype,
            reduction_length=expected.reduction_length,
            scale=expected.scale,
            reference_error=reference_error,
            added=expected.added,
        )


def random_state(call: Call) -> Tensor | None:
    """What the host would draw the chip's own numbers from, before the operator runs.

    None: it draws none, or others. Attention that ditorch lowers drops the same on the host.
    """
    chip = chip_of(call)
    if chip is None or not is_random(call) or not dropout_of(call):
        return None
    state: Tensor = torch.get_device_module(chip).get_rng_state(chip)
    return state if state.numel() == torch.get_rng_state().numel() else None


def reference_of(call: Call, standards: Standards, numbers: Tensor | None = None) -> Reference:
    """Call it before the operator runs, or with copies of its inputs: they are only read.

    numbers: its `random_state`.
    """
    rule = standards.numbers_of(call.operator).rule
    if is_communication(call):
        return Reference(call.operator, note="its results depend on other ranks' inputs")
    is_free = is_random(call) and definition_of(call) is None and numbers is None
    if is_free and rule != "not compared":
        return Reference(call.operator, note="it draws random numbers")
    if rule == "not compared":
        expected = {name: Expected(each, each.dtype) for name, each in on_meta(call).items()}
        return Reference(call.operator, expected, "" if expected else "its results may differ")
    try:
        with torch.no_grad():
            if rule == "equal":
                return Reference(call.operator, _exact(call))
            return _in_float64(call, standards, numbers)
    except Exception as error:  # whatever it is, the program being watched goes on
        return Reference(call.operator, note=f"the host cannot compute it: {_first_words(error)}")


def _exact(call: Call) -> dict[str, Expected]:
    host = on_host(call)
    results = run_on_host(host)
    expected = {name: Expected(each, each.dtype) for name, each in results.items()}
    for name, selected in _selected(host, results).items():
        expected[name] = Expected(selected(results[name]), results[name].dtype, selected=selected)
    return expected


def _run_of(call: Call, numbers: Tensor | None) -> Run:
    """What computes such calls; on the host, each time with the same random numbers."""
    if (definition := definition_of(call)) is not None:
        return definition
    attends = dropout_of(call) is not None and "_backward" not in call.operator

    def drawn(call: Call) -> Results:
        if numbers is None:
            return run_on_host(call)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(numbers)
            return run_on_host(call)

    def first(call: Call) -> Results:
        return {"out.0": drawn(call)["out.0"]}  # what else attention gives, each chip has its own

    return first if attends else drawn


def _in_float64(call: Call, standards: Standards, numbers: Tensor | None) -> Reference:
    dtypes = {name: each.dtype for name, each in on_meta(call).items()}
    wide = widened(call, dtypes)
    run = _run_of(call, numbers)
    note = ""
    try:
        results = run(wide)
    except (RuntimeError, NotImplementedError) as error:
        wide = on_host(call)
        results = run(wide)
        note = f"the truth is the host's in its own dtype: {_first_words(error)}"
    scales = {}
    if dtypes and all(is_rounded_once(call, dtype) for dtype in dtypes.values()):
        scales = {name: torch.zeros(1) for name in results}
    elif not note:
        scales = _scales(wide, standards, run)
    expected = {
        name: Expected(
            each,
            dtypes.get(name),
            scales.get(name),
            _reduction_length(call, each),
            _added(wide, each),
            _is_saved(call, name),
        )
        for name, each in results.items()
    }
    return Reference(call.operator, expected, note)


def _first_words(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line if len(line) <= 160 else f"{line[:160]} ..."


def _scales(call: Call, standards: Standards, run: Run) -> Results:
    try:
        by_definition = scale_from_definition(call)
        if by_definition is not None:
            return by_definition
        if standards.numbers_of(call.operator).scale == "terms":
            return scale_of_terms(call, run)
        return sensitivity(call, run)
    except (RuntimeError, NotImplementedError):
        return {}  # it is then |expected|


def _selected(call: Call, results: Results) -> dict[str, Selected]:
    """Returns for each result of indices a function that gives the elements they point to.

    Two chips may find different indices of equal elements, so the elements are compared.
    """
    name = operator_names(call.operator)[-1]
    source = next((tensor for _, tensor in inputs(call)), None)
    if source is None or source.dim() == 0:
        return {}
    if name.startswith(("max_pool", "adaptive_max_pool")) and "out.1" in results:
        planes = source.flatten(-int(name[name.index("pool") + 4]))
        return {"out.1": lambda at: planes.gather(-1, at.flatten(planes.dim() - 1)).view(at.shape)}
    dim = argument(call, "dim")
    if name in ("argmax", "argmin"):
        if dim is None:
            return {"out": lambda at: source.flatten().gather(0, at.flatten()).view(at.shape)}
        kept = bool(argument(call, "keepdim"))
        return {"out": lambda at: source.gather(dim, at if kept else at.unsqueeze(dim))}
    if name in _WITH_INDICES and "out.1" in results:
        return {"out.1": lambda at: source.gather(dim, _like(at, source, dim))}
    return {"out": lambda at: source.gather(dim, at)} if name == "argsort" else {}


_WITH_INDICES = (
    "sort",
    "topk",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "max",
    "min",
    "cummax",
    "cummin",
)


def _like(indices: Tensor, source: Tensor, dim: int) -> Tensor:
    return indices if indices.dim() == source.dim() else indices.unsqueeze(dim)


def _reduction_length(call: Call, result: Tensor) -> int:
    """How many terms an element of `result` adds up."""
    given = [tensor for _, tensor in inputs(call)]
    if not given or not result.numel():
        return 1
    length = max(tensor.numel() for tensor in given) // result.numel()
    name = operator_names(call.operator)[-1]
    if any(part in name for part in ("index", "scatter", "embedding", "put")):
        return max(length, _most_to_one_element(given))
    if "cum" in name:
        return max(given[0].shape, default=1)
    weight = argument(call, "weight")
    if "conv" in name and isinstance(weight, Tensor):
        length = max(length, weight[0].numel(), weight.numel() // weight.shape[1])
        gradient = argument(call, "grad_output")
        return length if gradient is None else max(length, gradient.numel() // weight.shape[0])
    normalized = argument(call, "normalized_shape")
    if normalized is not None:
        return max(length, prod(normalized))
    if name.endswith(("mm", "mv", "dot", "linear", "matmul")):
        left = next(filter(lambda t: t is not None, (argument(call, n) for n in _LEFT)), given[0])
        return int(left.shape[-1]) if left.dim() else 1
    return max(length, given[0].shape[-1]) if "softmax" in name and given[0].dim() else length


_LEFT = ("mat1", "batch1", "mat")


def _most_to_one_element(given: list[Tensor]) -> int:
    """How many terms may share an element: no more than any tensor of indices repeats one."""
    indices = [each for each in given if each.dtype in (torch.int64, torch.int32) and each.numel()]
    counts = [int(each.unique(return_counts=True)[1].max()) for each in indices]
    return 1 + min(counts, default=0)


def _added(call: Call, result: Tensor) -> Tensor | None:
    """|beta * self| of addmm and its like."""
    beta = argument(call, "beta")
    if beta is None or not operator_names(call.operator)[-1].startswith(("addm", "badd", "addb")):
        return None
    return (argument(call, "self") * beta).abs().expand_as(result)


def _is_saved(call: Call, name: str) -> bool:
    is_forward = "_backward" not in call.operator
    saves = any(part in call.operator for part in _SAVING)
    return is_forward and saves and name.startswith("out.") and name != "out.0"


_SAVING = ("layer_norm", "group_norm", "batch_norm", "rms_norm", "scaled_dot_product")
_STATISTICS = (torch.float32, torch.float16, torch.bfloat16)
