"""Sequence parallelism: which of a block's modules have all rows, and which this rank's alone.

Between its modules a block has a rank's own rows, as if they were one sequence: [1, rows / tp,
hidden]. Norms and residuals are of these. Any other module is given all rows, as sequences, and
what it returns are the rank's own ones again: the family's code inside sees what it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heteropp.models.hugging_face import cuts as styles
from heteropp.models.hugging_face.communication import EqualParts, SummedLast, Within
from heteropp.models.hugging_face.cuts import Cuts, cuts_of
from heteropp.models.hugging_face.family import LAYERS, Family
from heteropp.models.hugging_face.lora import is_added
from heteropp.models.parallel.tensor_parallel import TensorParallelGroup

_BY_FEATURES = (styles.COLUMN, styles.PACKED_COLUMN, styles.ROW, styles.PACKED_ROW)


@dataclass(frozen=True)
class AllRows:
    """A module of a block that has all rows, and what stands before and behind it."""

    name: str
    module: nn.Module
    ranks: Within
    length: Callable[[], int]  # tokens of a sequence in the pass that runs
    is_cut: bool
    are_routed: bool  # beside rows it takes their experts, and the weights of these

    def holds(self, name: str) -> bool:
        """Whether it is, or has in it, a module of the block."""
        return f"{name}.".startswith(f"{self.name}.")

    def surround(self) -> None:
        """Has the module gather rows before it runs, and leave this rank's own behind it."""
        self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.module.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, _: nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        if self.are_routed:
            return tuple(map(self._all, given)), {key: self._all(x) for key, x in named.items()}
        if given:
            return (self._all(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": self._all(named["hidden_states"])}

    def _leave(self, _: nn.Module, given: tuple, named: dict, result: Any) -> Any:
        if self._is_by_row(given[0] if given else named["hidden_states"]):
            return result
        if isinstance(result, tuple):
            return (self._own(result[0]), *result[1:])
        return self._own(result)

    def _is_by_row(self, x: Tensor) -> bool:
        """Whether rows need not be gathered: they are not told as sequences, as to a router."""
        return x.ndim == 2 and not self.is_cut

    def _all(self, x: Tensor) -> Tensor:
        if self._is_by_row(x):
            return x
        rows = self.ranks.entered(x.reshape(-1, x.shape[-1]))
        return rows.view(-1, self.length(), x.shape[-1]) if x.ndim == 3 else rows

    def _own(self, x: Tensor) -> Tensor:
        own = self.ranks.left(x.reshape(-1, x.shape[-1]))
        return own.unsqueeze(0) if x.ndim == 3 else own


def modules_of_all_rows(
    block: nn.Module, cuts: Cuts, group: TensorParallelGroup, length: Callable[[], int], hidden: int
) -> list[AllRows]:
    """Returns a block's modules that do not treat each row by itself.

    length: tokens of a sequence in the pass that runs; hidden: features of a row.
    """
    return [
        AllRows(
            name,
            module,
            (SummedLast if _sums_last(name, module, cuts, hidden) else EqualParts)(group),
            length,
            is_cut=any(f"{each}.".startswith(f"{name}.") for each in cuts.styles),
            are_routed=cuts.of(name) == styles.EXPERTS,
        )
        for name, module in _not_of_rows(block, cuts)
    ]


def uncuttable(found: Family) -> str | None:
    """Says in a clause why a family's rows cannot be cut; None: they can.

    What a Linear layer gives that is cut by features is not gathered by rows.
    """
    for kind in dict.fromkeys(found.kinds):
        i = found.source(kind)
        block = found.base.layers[i]
        cuts = cuts_of(found, f"{LAYERS}.{i}.", block)
        for name, module in _not_of_rows(block, cuts):
            if isinstance(module, nn.Linear) and cuts.of(name) in _BY_FEATURES:
                return f"{name}, which is cut by features, is in no module of its block"
    return None


def _not_of_rows(block: nn.Module, cuts: Cuts, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in block.named_children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _not_of_rows(module, cuts, f"{prefix}{name}.")
        elif not _is_of_rows(f"{prefix}{name}", module, cuts):
            yield f"{prefix}{name}", module


def _is_of_rows(name: str, module: nn.Module, cuts: Cuts) -> bool:
    """Whether a module is a norm, a Linear layer that is not cut, or has no parameters."""
    if isinstance(module, nn.Linear):
        return cuts.of(name) is None
    return all(parameter.ndim == 1 for parameter in module.parameters())


def _sums_last(name: str, module: nn.Module, cuts: Cuts, hidden: int) -> bool:
    """Whether what a module returns is a sum of what ranks have, and nothing inside needs it.

    So it is where one cut layer ends it, and where experts are added up, unless a norm follows on
    them, or an expert that is not cut is beside them: these have parameters of as many rows as
    there are features, which routers have not.
    """
    if cuts.of(name) == styles.EXPERTS:
        return True
    inner = {each: cuts.of(f"{name}.{each}") for each, _ in module.named_modules() if each}
    if styles.EXPERTS in inner.values():
        return not any(
            len(value) == hidden and cuts.of_parameter(f"{name}.{each}") is None
            for each, value in module.named_parameters()
            if not is_added(each)
        )
    sums = [each for each, style in inner.items() if style in styles.SUMS]
    return len(sums) == 1 and "." not in sums[0]
