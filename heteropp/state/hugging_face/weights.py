"""Weights in a Hugging Face folder, read slice by slice into any layout.

A folder holds config.json and model.safetensors, or several files and
model.safetensors.index.json, which says which tensor is in which. How its tensors are named, and
which way round they stand, is the family's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heteropp.description.files import FileError, read_json
from heteropp.description.model import read_config
from heteropp.layout.boxes import Box
from heteropp.models.hugging_face_format import HuggingFaceTensor
from heteropp.models.spec import ModelSpec, Parameter
from heteropp.models.stage_module import StageModule

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
# what a plan's model may have otherwise than the folder; its sequences may only be shorter
CHOSEN = ("dtype", "sequence_length")


@dataclass(frozen=True)
class _Index:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    weight_map: dict[str, str]  # tensor to file


class Weights:
    """The tensors of a folder, of which only the slices asked for are read."""

    def __init__(self, folder: Path) -> None:
        """Raises FileError when the folder holds no safetensors files."""
        self.folder = folder
        self.files: dict[str, Any] = {}  # open ones, by name
        index = folder / INDEX
        if index.exists():
            self.places = read_json(index, _Index).weight_map
        elif (folder / SINGLE).exists():
            self.places = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise FileError(
                f"{folder} holds neither {SINGLE} nor {INDEX}; expected weights as safetensors"
            )

    def check(self, model: ModelSpec) -> None:
        """Checks that every parameter of a model is there, in its shape. Raises FileError."""
        for parameter in model.parameters():
            self._slices(self._stored(model, parameter))

    def read(self, model: ModelSpec, parameter: Parameter, box: Box) -> Tensor:
        """Returns a slice of a parameter, on the host, in the file's dtype. Raises FileError."""
        stored = self._stored(model, parameter)
        (first, last), *others = box.ranges
        spans = [slice(first + stored.first_row, last + stored.first_row)]
        spans += [slice(*span) for span in others]
        slices = self._slices(stored)
        return slices[tuple(spans[::-1])].t() if stored.transposed else slices[tuple(spans)]

    def _stored(self, model: ModelSpec, parameter: Parameter) -> HuggingFaceTensor:
        if (found := model.hugging_face()) is None:
            raise FileError(f"{self.folder}: models of family {model.family} have no such folders")
        return found.stored(model, parameter)

    def _slices(self, stored: HuggingFaceTensor) -> Any:
        """Returns the file's view of a whole tensor, from which slices are taken."""
        name = stored.name
        if name not in self.places and stored.other_name in self.places:
            name = stored.other_name
        if name not in self.places:
            raise FileError(f"{self.folder} holds no tensor {name}")
        path = self.folder / self.places[name]
        try:
            tensor = self._open(self.places[name]).get_slice(name)
        except SafetensorError:
            raise FileError(f"{path} holds no tensor {name}, which {INDEX} says it does") from None
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape != stored.shape:
            raise FileError(f"{path}: {name} has shape {shape}; expected {stored.shape}")
        if dtype not in FLOATS:
            raise FileError(
                f"{path}: {name} has dtype {dtype}; expected one of {', '.join(FLOATS)}"
            )
        return tensor

    def _open(self, name: str) -> Any:
        if name not in self.files:
            path = self.folder / name
            if Path(name).name != name or path.suffix != ".safetensors":
                raise FileError(
                    f"{self.folder / INDEX}: {name!r} is not the name of a safetensors file"
                )
            try:
                self.files[name] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise FileError(f"{path} is not a whole safetensors file: {error}") from None
            except OSError as error:
                raise FileError(f"{path} cannot be read: {error}") from None
        return self.files[name]


def check_from(folder: Path, model: ModelSpec) -> None:
    """Checks that a plan's model can start from a folder's weights. Raises FileError."""
    check_same(folder, model)
    Weights(folder).check(model)


def check_same(folder: Path, model: ModelSpec) -> None:
    """Checks that a folder's config.json is of this model. Raises FileError."""
    path = folder / "config.json"
    family, theirs = read_config(path)
    if family is not type(model):
        raise FileError(f"{path}: the model is of another family; expected {model.family}")
    for name, value in theirs.items():
        if name not in CHOSEN and value != getattr(model, name):
            raise FileError(f"{path}: {name} is {value}; the model has {getattr(model, name)}")
    if model.sequence_length > theirs["sequence_length"]:
        raise FileError(
            f"{path}: max_position_embeddings is {theirs['sequence_length']}; the model has "
            f"sequences of {model.sequence_length} tokens"
        )


@torch.no_grad()
def load_weights(folder: Path, module: StageModule) -> None:
    """Fills a ministage's parameters with this rank's slices of a folder's. Raises FileError."""
    weights, group, model = Weights(folder), module.group, module.model
    parameters = {parameter.name: parameter for parameter in model.parameters()}
    for name, target in module.named_parameters():
        parameter = parameters[model.global_name(name)]
        boxes = parameter.boxes(group.size, group.index)
        values = [weights.read(model, parameter, box) for box in boxes]
        value = torch.cat(values, parameter.split_dimension or 0) if values[1:] else values[0]
        target.copy_(value.to(target.dtype).contiguous())
