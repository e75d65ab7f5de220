"""What a family says of its Hugging Face folders: config.json, and how tensors are named there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from heteropp.models.spec import Parameter


@dataclass(frozen=True)
class HuggingFaceTensor:
    """Where a folder's files hold a parameter: a tensor, or rows of one."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor, as it is stored
    transposed: bool = False  # it is stored as [in, out]
    first_row: int = 0  # of the parameter, once the tensor is turned the right way
    other_name: str | None = None  # that some folders have for it


class HuggingFaceFormat(ABC):
    """The folders of one family."""

    model_types: ClassVar[tuple[str, ...]]  # of config.json that this family reads
    config: ClassVar[type]  # a pydantic dataclass of what is read of config.json

    @abstractmethod
    def fields(self, config: Any) -> dict[str, Any]:
        """Returns a config as fields of the family's spec, but its name. Raises ModelError."""

    @abstractmethod
    def config_of(self, model: Any) -> dict[str, Any]:
        """Returns a model's config.json, as releases 4 and 5 of transformers read it."""

    @abstractmethod
    def stored(self, model: Any, parameter: Parameter) -> HuggingFaceTensor:
        """Returns where a parameter stands."""
