"""Weights in a Hugging Face folder, read slice by slice into any layout.

A folder holds config.json and model.safetensors, or several files and
model.safetensors.index.json, which says which tensor is in which. Their rotary embedding turns the
same pairs as ours, so that only names differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heteropp.description.boxes import Box
from heteropp.description.files import FileError, read_json
from heteropp.description.hugging_face import read_config
from heteropp.description.model import Model
from heteropp.models.llama.parameters import Parameter, global_name, model_parameters
from heteropp.models.llama.stage import StageModule

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
# what a plan's model may have otherwise than the folder; its sequences may only be shorter
CHOSEN = ("name", "dtype", "sequence_length")
# ours to theirs; a layer's stand under "layers.17." and "model.layers.17."
NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def tensor_name(parameter: str) -> str:
    """Returns a Hugging Face file's name for a parameter such as "layers.17.mlp.up.weight"."""
    name = parameter.removesuffix(".weight")
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.weight"


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

    def check(self, model: Model) -> None:
        """Checks that every parameter of a model is there, in its shape. Raises FileError."""
        for parameter in model_parameters(model):
            self._slices(parameter)

    def read(self, parameter: Parameter, box: Box) -> Tensor:
        """Returns a slice of a parameter, on the host, in the file's dtype. Raises FileError."""
        return self._slices(parameter)[tuple(slice(*span) for span in box.ranges)]

    def _slices(self, parameter: Parameter) -> Any:
        """Returns the file's view of a whole parameter, from which slices are taken."""
        name = tensor_name(parameter.name)
        if name not in self.places:
            raise FileError(f"{self.folder} holds no tensor {name}")
        path = self.folder / self.places[name]
        try:
            tensor = self._open(self.places[name]).get_slice(name)
        except SafetensorError:
            raise FileError(f"{path} holds no tensor {name}, which {INDEX} says it does") from None
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape != parameter.shape:
            raise FileError(f"{path}: {name} has shape {shape}; expected {parameter.shape}")
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


def check_from(folder: Path, model: Model) -> None:
    """Checks that a plan's model can start from a folder's weights. Raises FileError."""
    check_same(folder, model)
    Weights(folder).check(model)


def check_same(folder: Path, model: Model) -> None:
    """Checks that a folder's config.json is of this model. Raises FileError."""
    path = folder / "config.json"
    theirs = read_config(path)
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
    parameters = {parameter.name: parameter for parameter in model_parameters(model)}
    for name, target in module.named_parameters():
        parameter = parameters[global_name(model, name)]
        value = weights.read(parameter, parameter.box(group.size, group.index))
        target.copy_(value.to(target.dtype).contiguous())
