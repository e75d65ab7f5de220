"""The Hugging Face folders of any family: config.json, and which tensors parameters are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from heteropp.models.assembly import Assembly
from heteropp.models.hugging_face.config import family_config
from heteropp.models.hugging_face.conversion import conversions, written
from heteropp.models.hugging_face.family import family
from heteropp.models.hugging_face_format import HuggingFaceFormat, Shapes
from heteropp.models.spec import ModelError, Parameter

if TYPE_CHECKING:
    from heteropp.models.hugging_face.config import Config
    from heteropp.models.hugging_face.model import HuggingFaceModel


class HuggingFaceFolder(HuggingFaceFormat):
    model_types = ()
    config = dict

    def fields(self, config: dict[str, Any]) -> dict[str, Any]:
        from heteropp.models.hugging_face.reading import fields_of

        return fields_of(config)

    def fields_in(
        self, folder: Path, config: dict[str, Any], model: HuggingFaceModel
    ) -> dict[str, Any]:
        from heteropp.models.hugging_face.reading import fields_of

        if (code := model.config.code) is not None:
            code.contents(folder)
        return fields_of(config, code)

    def code(self, model: HuggingFaceModel) -> Mapping[str, bytes]:
        return {} if model.config.code is None else model.config.code.contents()

    def config_of(self, model: HuggingFaceModel) -> dict[str, Any]:
        return {
            "architectures": [type(family(model.config).model).__name__],
            **model.config.values(),
            "torch_dtype": model.dtype,
        }

    def differences(
        self, fields: dict[str, Any], model: HuggingFaceModel
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yields entries of config.json that are not alike, where the family's defaults count."""
        theirs, ours = _entries(fields["config"]), _entries(model.config)
        for key in {**ours, **theirs}:
            if theirs.get(key) != ours.get(key):
                yield key, theirs.get(key), ours.get(key)

    def made_of(self, model: HuggingFaceModel, stored: Shapes) -> Callable[[Parameter], Assembly]:
        return _Tensors(model, stored).of

    def written(self, model: HuggingFaceModel) -> Mapping[str, Assembly]:
        names = names_of(model.config)
        parameters = {
            names[each.name]: Assembly.of(each.name, each.shape) for each in model.parameters()
        }
        return written(family(model.config).model, parameters)

    def dtype(self, model: HuggingFaceModel, parameter: str) -> str:
        return _dtypes(model.config, model.dtype)[names_of(model.config)[parameter]]


class _Tensors:
    """The tensors of a folder, and which of them parameters are made of."""

    def __init__(self, model: HuggingFaceModel, stored: Shapes) -> None:
        """Raises ModelError where a tensor is nothing of the model's."""
        self.model, self.stored = model, stored
        self.family, self.names = family(model.config), names_of(model.config)
        self.conversions, unexpected = conversions(self.family.model, stored)
        taken = {self.names[each.name] for each in model.parameters()}
        taken |= {self.names[name] for name in model.tied}
        unexpected += [
            each.tensors[0][0] for name, each in self.conversions.items() if name not in taken
        ]
        if unexpected:
            more = f", and {len(unexpected) - 1} more" if unexpected[1:] else ""
            raise ModelError(f"tensor {unexpected[0]}{more}: nothing of the model's")
        self.made: dict[str, Assembly] = {}  # so far, by transformers' names

    def of(self, parameter: Parameter) -> Assembly:
        """Returns what a parameter is made of, in its shape. Raises ModelError."""
        name = self._held_as(self.names[parameter.name])
        problem = ""
        if name not in self.made and name in self.conversions:
            try:
                self.made |= self.conversions[name].run(self.family.model, self.stored)
            except (TypeError, ValueError) as error:
                problem = str(error)
        found = self.made.get(name)
        if found is None or found.shape != parameter.shape:
            self._refuse(parameter, name, problem)
        return found

    def _held_as(self, name: str) -> str:
        """Returns a parameter's name, or of what is tied to it where the folder has that alone."""
        if name not in self.conversions:
            for other, of in self.family.model.all_tied_weights_keys.items():
                if of == name and other in self.conversions:
                    return str(other)
        return name

    def _refuse(self, parameter: Parameter, name: str, problem: str) -> NoReturn:
        """Raises ModelError: of a parameter's tensors, names the one that is not as usual."""
        expected = {
            name: assembly
            for name, assembly in HuggingFaceFolder().written(self.model).items()
            if parameter.name in assembly.sources
        }
        for each, assembly in expected.items():
            if each not in self.stored:
                raise ModelError(f"it holds no tensor {each}")
            if self.stored[each] != assembly.shape:
                raise ModelError(f"{each} has shape {self.stored[each]}; expected {assembly.shape}")
        if name in self.conversions:
            for each, _ in self.conversions[name].tensors:
                if each not in expected:
                    raise ModelError(f"tensor {each}: nothing of the model's")
        raise ModelError(f"its tensors do not make {parameter.name}, {parameter.shape}: {problem}")


@lru_cache(maxsize=8)
def names_of(config: Config) -> dict[str, str]:
    """Returns transformers' names of parameters by ours, which are those in the base model."""
    model = family(config).model
    prefix = f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): name for name in model.state_dict()}


@lru_cache(maxsize=8)
def _dtypes(config: Config, dtype: str) -> dict[str, str]:
    """Returns the dtype of every parameter, by transformers' name, of a model that is in a dtype.

    Families keep some in float32.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            deepcopy(family_config(config)), dtype=getattr(torch, dtype)
        )
    wide = [
        re.compile(pattern.replace("*", ".*"))
        for pattern in model._get_dtype_plan(getattr(torch, dtype))
    ]
    return {
        name: "float32"
        if any(pattern.search(name) for pattern in wide)
        else str(value.dtype).removeprefix("torch.")
        for name, value in model.state_dict().items()
    }


def _entries(config: Config) -> dict[str, Any]:
    entries: dict[str, Any] = family_config(config).to_dict()
    return {**entries, "model_type": config.values()["model_type"]}
