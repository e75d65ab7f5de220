"""PyTorch's own operator database, run on this process's device against the CPU.

Each operator runs over its dtypes, a few samples of each and every variant (see `variants`). A
sample that the CPU itself refuses is not counted. What is compared: values, NaN and inf positions,
dtypes, shapes, the structure of the result, which results share memory with which inputs, and that
inputs change exactly as on the CPU. Random operators draw other numbers on every device: they are
compared by dtype and shape, and must repeat themselves from an equal seed.
"""

from __future__ import annotations

import fnmatch
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ditorch.conform.results import Outcome, Settings
from ditorch.conform.sample import check_sample
from ditorch.conform.variants import VARIANTS, SampleCall, Variant

DATABASE = "torch.testing._internal.common_methods_invocations"
"""The module of PyTorch's operator database; it takes seconds to import."""

_SAMPLES_CONSIDERED = 48  # the first of an operator's samples; we choose among them, evenly spread


@cache
def _database() -> dict[str, Any]:
    """Raises ImportError in one sentence if torch's test modules cannot be imported."""
    try:
        op_db = importlib.import_module(DATABASE).op_db
    except ModuleNotFoundError as error:
        raise ImportError(
            f"PyTorch's operator database needs the package {error.name!r}: pip install "
            f"{error.name}"
        ) from None
    return {operator.full_name: operator for operator in op_db}


def operator_names(patterns: Sequence[str] = ()) -> list[str]:
    """The operators that match one of the glob patterns, in order; all if there are none.

    Raises ValueError if a pattern matches nothing.
    """
    names = sorted(_database())
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no operator of PyTorch's database matches {pattern!r}")
    chosen = set().union(*(fnmatch.filter(names, pattern) for pattern in patterns))
    return [name for name in names if name in chosen or not patterns]


def check_operator(
    name: str, settings: Settings, about_to: Callable[[str, str, int], None]
) -> Iterator[Outcome | None]:
    """Yields what became of each sample; None for one that the CPU refuses.

    `about_to` hears of the dtype, variant and sample that comes next, should it end the process.
    """
    operator = _database()[name]
    for dtype in _dtypes(operator, settings):
        for variant in VARIANTS:
            if not variant.exists(operator) or (
                variant.needs_gradients and dtype not in operator.supported_backward_dtypes("cpu")
            ):
                continue
            for i, call in enumerate(_calls(operator, dtype, variant, settings)):
                short = str(dtype).removeprefix("torch.")
                about_to(short, variant.name, i)
                outcome = check_sample(variant, call, dtype)
                yield outcome and replace(outcome, dtype=short, variant=variant.name, sample=i)


def _dtypes(operator: Any, settings: Settings) -> list[torch.dtype]:
    """The dtypes to test: those that the operator supports on the CPU, in a fixed order.

    Where the settings name dtypes, only these are tested.
    """
    supported = sorted(operator.supported_dtypes("cpu"), key=str)
    wanted = {f"torch.{name}" for name in settings.dtypes}
    return [dtype for dtype in supported if str(dtype) in wanted or not wanted]


def _calls(
    operator: Any, dtype: torch.dtype, variant: Variant, settings: Settings
) -> Iterator[SampleCall]:
    """The chosen samples on the CPU; none if the database cannot make them there."""
    torch.manual_seed(settings.seed)
    try:
        made = operator.sample_inputs("cpu", dtype, requires_grad=variant.needs_gradients)
        samples = list(itertools.islice(made, _SAMPLES_CONSIDERED))
    except Exception:  # without the CPU's own samples there is nothing to hold the chip against
        return
    if variant.name == "in-place":
        samples = [sample for sample in samples if not sample.broadcasts_input]
    count = min(len(samples), settings.samples_per_dtype)
    for i in range(count):
        sample = samples[i * len(samples) // count]
        yield SampleCall(
            operator, sample.input, sample.args, sample.kwargs, sample.output_process_fn_grad,
            settings.seed,
        )  # fmt: skip
