"""What a family says of its Hugging Face folders: config.json, and the tensors of its weights.

Both ways, a tensor is an assembly of slices: to read, each parameter of a folder's tensors; to
write, each of a folder's tensors of parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from heteropp.models.assembly import Assembly
from heteropp.models.spec import ModelError, Parameter

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


class HuggingFaceFormat(ABC):
    """The folders of one family."""

    model_types: ClassVar[tuple[str, ...]]  # of config.json that this family reads; (): any
    config: ClassVar[type]  # of what is read of config.json

    @abstractmethod
    def fields(self, config: Any) -> dict[str, Any]:
        """Returns a config as fields of the family's spec, but its name. Raises ModelError."""

    def fields_in(self, folder: Path, config: Any, model: Any) -> dict[str, Any]:
        """Returns the same of a folder that is to be of `model`. Raises ModelError."""
        return self.fields(config)

    @abstractmethod
    def config_of(self, model: Any) -> dict[str, Any]:
        """Returns a model's config.json, as releases 4 and 5 of transformers read it."""

    def differences(self, fields: dict[str, Any], model: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields in what a model is not what `fields` says: a name, their value and its own."""
        for name, value in fields.items():
            if value != getattr(model, name):
                yield name, value, getattr(model, name)

    @abstractmethod
    def made_of(self, model: Any, stored: Shapes) -> Callable[[Parameter], Assembly]:
        """Returns what says which of a folder's tensors a parameter is made of, in its shape.

        Both raise ModelError where the folder's tensors are not the model's.
        """

    @abstractmethod
    def written(self, model: Any) -> Mapping[str, Assembly]:
        """Returns a folder's tensors, by name, and the parameters that each is made of."""

    def code(self, model: Any) -> Mapping[str, bytes]:
        """Returns files of code that belong to a folder, by name. Raises ModelError."""
        return {}

    def dtype(self, model: Any, parameter: str) -> str:
        """Returns the dtype in which a folder holds a parameter."""
        dtype: str = model.dtype
        return dtype


@dataclass(frozen=True)
class HuggingFaceTensor:
    """Where a folder's files hold a parameter: a tensor, or rows of one."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor, as it is stored
    transposed: bool = False  # it is stored as [in, out]
    first_row: int = 0  # of the parameter, once the tensor is turned the right way
    other_name: str | None = None  # that some folders have for it


class HuggingFaceTable(HuggingFaceFormat):
    """The folders of a family that has a table of its tensors' names."""

    @abstractmethod
    def stored(self, model: Any, parameter: Parameter) -> HuggingFaceTensor:
        """Returns where a parameter stands."""

    def made_of(self, model: Any, stored: Shapes) -> Callable[[Parameter], Assembly]:
        def assembly(parameter: Parameter) -> Assembly:
            tensor = self.stored(model, parameter)
            names = (tensor.name, tensor.other_name or tensor.name)
            if (name := next((each for each in names if each in stored), None)) is None:
                raise ModelError(f"it holds no tensor {tensor.name}")
            if stored[name] != tensor.shape:
                raise ModelError(f"{name} has shape {stored[name]}; expected {tensor.shape}")
            found = Assembly.of(name, tensor.shape)
            if tensor.transposed:
                found = found.transpose(0, 1)
            return found.narrow(0, tensor.first_row, tensor.first_row + parameter.shape[0])

        return assembly

    def written(self, model: Any) -> Mapping[str, Assembly]:
        rows: dict[str, list[Assembly]] = {}
        transposed = set()
        for parameter in model.parameters():
            tensor = self.stored(model, parameter)
            rows.setdefault(tensor.name, []).append(Assembly.of(parameter.name, parameter.shape))
            if tensor.transposed:
                transposed.add(tensor.name)
        whole = {name: Assembly.cat(each) for name, each in rows.items()}
        return {
            name: each.transpose(0, 1) if name in transposed else each
            for name, each in whole.items()
        }
