"""Weights in a Hugging Face folder, read slice by slice into any layout.

A folder holds config.json and model.safetensors, or several files and
model.safetensors.index.json, which says which tensor is in which. Which slices of its tensors a
parameter is made of is the family's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heteropp.description.files import FileError, read_json
from heteropp.layout.boxes import Box
from heteropp.models.assembly import Assembly
from heteropp.models.hugging_face_format import HuggingFaceFormat
from heteropp.models.spec import ModelError, ModelSpec, Parameter
from heteropp.models.stage_module import StageModule, put

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
# what a plan's model may have otherwise than the folder; its sequences may only be shorter
CHOSEN = ("dtype", "sequence_length")
COMPARED_ELEMENTS = 1 << 24  # of two tensors at a time


@dataclass(frozen=True)
class _Index:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    weight_map: dict[str, str]  # tensor to file


class Weights:
    """A model's parameters in a folder, of which only the slices asked for are read."""

    def __init__(self, folder: Path, model: ModelSpec) -> None:
        """Raises FileError when the folder has no safetensors files, or not of such a model."""
        self.folder = folder
        self.model = model = model.base()
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
        shapes = _Shapes(self.places, lambda name: tuple(self._tensor(name).get_shape()))
        with self._naming_the_folder():
            self.made_of = format_of(model).made_of(model, shapes)

    def check(self) -> None:
        """Checks that every parameter of the model is there, in its shape. Raises FileError."""
        for parameter in self.model.parameters():
            for name in self._assembly(parameter).sources:
                self._tensor(name)
        self._check_tied()

    def read(self, parameter: Parameter, box: Box) -> Tensor:
        """Returns a slice of a parameter, on the host, in the folder's dtype. Raises FileError."""
        return self._read(self._assembly(parameter), box)

    def _read(self, assembly: Assembly, box: Box) -> Tensor:
        def fetch(name: str, wanted: Box) -> Tensor:
            return self._tensor(name)[tuple(slice(*span) for span in wanted.ranges) or ...]

        return assembly.read(box, fetch)

    def _assembly(self, parameter: Parameter) -> Assembly:
        with self._naming_the_folder():
            found = self.made_of(parameter)
            if found.shape != parameter.shape:
                raise ModelError(
                    f"{parameter.name} has shape {found.shape}, of {found.sources[0]}; "
                    f"expected {parameter.shape}"
                )
            return found

    def _check_tied(self) -> None:
        """Checks that what a folder holds twice, though it is one parameter, is the same."""
        parameters = {parameter.name: parameter for parameter in self.model.parameters()}
        for name, of in self.model.tied.items():
            parameter = parameters[of]
            try:
                copy = self.made_of(replace(parameter, name=name))
            except ModelError:  # it is not there, as is usual
                continue
            kept = self._assembly(parameter)
            rows = max(1, COMPARED_ELEMENTS // prod(parameter.shape[1:]))
            for first in range(0, parameter.shape[0], rows):
                last = min(first + rows, parameter.shape[0])
                box = Box(((first, last), *Box.whole(parameter.shape[1:]).ranges))
                if copy.shape != kept.shape or not torch.equal(
                    self._read(copy, box), self._read(kept, box)
                ):
                    raise FileError(
                        f"{self.folder}: {copy.sources[0]} is not the same as {kept.sources[0]}, "
                        f"to which {CONFIG} ties it"
                    )

    def _tensor(self, name: str) -> Any:
        """Returns the file's view of a whole tensor, from which slices are taken."""
        path = self.folder / self.places[name]
        try:
            tensor = self._open(self.places[name]).get_slice(name)
        except SafetensorError:
            raise FileError(f"{path} holds no tensor {name}, which {INDEX} says it does") from None
        if (dtype := tensor.get_dtype()) not in FLOATS:
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

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            raise FileError(f"{self.folder}: {error}") from None


class _Shapes(Mapping[str, tuple[int, ...]]):
    """Shapes of a folder's tensors; a file is opened when one of its tensors is asked for."""

    def __init__(self, names: Mapping[str, str], shape: Callable[[str], tuple[int, ...]]) -> None:
        self.names, self.shape = names, shape

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self.names:
            raise KeyError(name)
        return self.shape(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def format_of(model: ModelSpec) -> HuggingFaceFormat:
    """Returns the form of a model's folders. Raises FileError when it has none."""
    if (found := model.hugging_face()) is None:
        raise FileError(f"models of family {model.family} have no form as a Hugging Face folder")
    return found


def check_from(folder: Path, model: ModelSpec) -> None:
    """Checks that a plan's model can start from a folder's weights. Raises FileError."""
    check_same(folder, model)
    Weights(folder, model).check()


def check_same(folder: Path, model: ModelSpec) -> None:
    """Checks that a folder's config.json is of this model. Raises FileError."""
    path = folder / CONFIG
    form = format_of(model)
    model_type = read_json(path, dict).get("model_type")
    if form.model_types and model_type not in form.model_types:
        raise FileError(f"{path}: the model is of another family; expected {model.family}")
    try:
        theirs = form.fields_in(folder, read_json(path, form.config), model)
    except ModelError as error:
        raise FileError(f"{path}: {error}") from None
    for name, value, ours in form.differences(theirs, model):
        if name not in CHOSEN:
            raise FileError(f"{path}: {name} is {value}; the model has {ours}")
    if model.sequence_length > theirs["sequence_length"]:
        raise FileError(
            f"{path}: max_position_embeddings is {theirs['sequence_length']}; the model has "
            f"sequences of {model.sequence_length} tokens"
        )


@torch.no_grad()
def load_weights(folder: Path, module: StageModule) -> None:
    """Fills a ministage's parameters with this rank's slices of a folder's. Raises FileError.

    Those that are not the base model's stay as they are.
    """
    model = module.model
    weights = Weights(folder, model)
    parameters = {parameter.name: parameter for parameter in weights.model.parameters()}
    for name, target in module.named_parameters():
        if (parameter := parameters.get(model.global_name(name))) is None:
            continue
        values = [weights.read(parameter, box) for box in module.boxes(parameter)]
        put(target, values)
