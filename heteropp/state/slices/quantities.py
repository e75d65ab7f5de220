"""What a training holds of every element of a model, and what files have of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from heteropp.description.hyperparameters import OptimizerName
from heteropp.models.spec import ModelSpec, Parameter

# what files have of parameters: the value, as exact as the optimizer's own, and the running
# averages of the gradient (Muon's momentum) and of its square; of frozen ones the value alone
StoredName = Literal["value", "average", "average_square"]
STORED: tuple[StoredName, ...] = get_args(StoredName)
QuantityName = Literal["parameter"] | StoredName


def stored_of(parameter: Parameter, optimizer: OptimizerName) -> tuple[StoredName, ...]:
    """Returns what files have of a parameter: of one that is frozen its value alone."""
    if not parameter.trains:
        return ("value",)
    return quantities_of_matrices(optimizer) if parameter.is_hidden_matrix else STORED


def quantities_of_matrices(optimizer: OptimizerName) -> tuple[StoredName, ...]:
    """Returns what files have of hidden matrices: Muon keeps no squares of their gradients."""
    return ("value", "average") if optimizer == "muon" else STORED


@dataclass(frozen=True)
class Quantity:
    """Something that is held of every element of a model, each rank's in a flat buffer.

    Of what is frozen there is the parameter alone.
    """

    name: QuantityName
    dtype: str
    whole: bool  # of all parameters of a ministage; otherwise of the rank's shard of them

    @property
    def itemsize(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def stored(self) -> StoredName:
        """What files have of it: a parameter is its value, in the model's dtype."""
        return "value" if self.name == "parameter" else self.name


def quantities_of(model: ModelSpec) -> tuple[Quantity, ...]:
    """Returns the quantities that training goes on from.

    A model of 16 bits also has a wide value (master copy) of every parameter; of another one the
    parameter is the value.
    """
    found = [Quantity("parameter", model.dtype, whole=True)]
    if model.dtype != model.wide_dtype:
        found.append(Quantity("value", model.wide_dtype, whole=False))
    found.append(Quantity("average", model.wide_dtype, whole=False))
    found.append(Quantity("average_square", model.wide_dtype, whole=False))
    return tuple(found)
