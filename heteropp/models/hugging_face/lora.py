"""LoRA: frozen Linear layers, and beside each a product of low rank that trains (Hu et al., 2021).

A layer that computes W x computes W x + B A x alpha / rank. Names, defaults and initial values are
those of the peft library. A product lies over a tensor-parallel group as the layer beside it: with
W cut along its outputs B is, and with W cut along its inputs A is; the other matrix is a copy, of
whose gradient each rank has a summand. So a product takes no communication of its own.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from heteropp.layout.parameter import Parameter
from heteropp.models.parted import Part
from heteropp.models.spec import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from heteropp.models.hugging_face.family import Family
    from heteropp.models.hugging_face.model import HuggingFaceModel

A, B = "lora_A", "lora_B"  # of shapes [rank, in] and [out, rank]
ALL = "all-linear"
EXPECTED = "r=RANK[,alpha=NUMBER][,targets=NAME+NAME], such as 'r=16,targets=q_proj+v_proj'"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which layers have a product beside them, and of which rank."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    rank: int  # inner size of each product of two matrices
    alpha: float  # alpha / rank is the factor of each product
    targets: tuple[str, ...]  # names of the blocks' Linear layers that get one, or their ends

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def fits(self, name: str) -> bool:
        return any(f".{name}".endswith(f".{target}") for target in self.targets)


def is_added(name: str) -> bool:
    """Whether a parameter is LoRA's."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def with_lora(model: HuggingFaceModel, text: str) -> HuggingFaceModel:
    """Returns a model with LoRA as a text such as "r=16,alpha=32" says. Raises ModelError.

    Unless it says otherwise alpha is twice the rank, and the targets are peft's for the family.
    """
    from heteropp.models.hugging_face.family import family

    if find_spec("peft") is None:
        raise ModelError("LoRA needs the peft library (pip install 'hyperhetero[lora]')")
    found = family(model.config)
    rank, alpha, targets = _parse(text)
    names = _linear_layers(found)
    lora = Lora(rank=rank, alpha=alpha, targets=_targets(targets, found, names))
    _check_targets(lora, found, names)
    return replace(model, lora=lora, parts=tuple(_part(part, lora) for part in model.parts))


def without(model: HuggingFaceModel) -> HuggingFaceModel:
    """Returns the model that the layers beside LoRA's products are."""
    parts = tuple(
        replace(part, parameters=tuple(p for p in part.parameters if not is_added(p.name)))
        for part in model.parts
    )
    return replace(model, lora=None, parts=parts)


def initial_values(
    model: HuggingFaceModel, layers: tuple[int, int], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields a stage's A and B by name, whole and on the host: A as peft draws it, and B zero."""
    import torch

    for parameter in model.parameters(layers):
        if is_added(parameter.name):
            value = torch.zeros(parameter.shape)
            if parameter.name.endswith(f".{A}.weight"):
                digest = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
                torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            yield parameter.name, value


def _part(part: Part, lora: Lora) -> Part:
    parameters = []
    for parameter in part.parameters:
        parameters.append(replace(parameter, trains=False))
        layer, _, leaf = parameter.name.rpartition(".")
        is_block = part.name not in ("embedding", "head")
        if is_block and leaf == "weight" and lora.fits(layer) and len(parameter.shape) == 2:
            parameters += _beside(parameter, layer, lora.rank)
    return Part(part.name, tuple(parameters))


def _beside(weight: Parameter, layer: str, rank: int) -> tuple[Parameter, Parameter]:
    outputs, inputs = weight.shape
    cut, packed = weight.split_dimension, weight.packed
    a, b = (
        Parameter(f"{layer}.{A}.weight", (rank, inputs), None),
        Parameter(f"{layer}.{B}.weight", (outputs, rank), None),
    )
    if cut is None:
        return replace(a, partial=weight.partial), replace(b, partial=weight.partial)
    if cut == 0:
        return replace(a, partial=True), replace(b, split_dimension=0, packed=packed)
    return replace(a, split_dimension=1, packed=packed), replace(b, partial=True)


def _linear_layers(found: Family) -> list[str]:
    """Returns the names in their blocks of all kinds of blocks' Linear layers."""
    from torch import nn

    from heteropp.models.hugging_face.family import LAYERS

    names: dict[str, None] = {}
    for kind in dict.fromkeys(found.kinds):
        block = found.module(f"{LAYERS}.{found.source(kind)}")
        names |= {name: None for name, m in block.named_modules() if isinstance(m, nn.Linear)}
    return list(names)


def _targets(given: tuple[str, ...], found: Family, names: list[str]) -> tuple[str, ...]:
    """Returns the targets that are given, or what they stand for. Raises ModelError."""
    if given == (ALL,):
        taken = _taken_by_peft(tuple(names), found)
        return tuple(name for name in names if name in taken)
    if given:
        return given
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    usual = USUAL.get(found.config.model_type)
    if not isinstance(usual, list):
        raise ModelError(
            f"peft has no usual LoRA targets of model_type {found.config.model_type}; give "
            f"targets={ALL}, or some of {_listed(names)}"
        )
    return tuple(usual)


def _check_targets(lora: Lora, found: Family, names: list[str]) -> None:
    """Raises ModelError for targets that are not Linear layers of blocks, or not so to peft."""
    for target in lora.targets:
        if not any(map(replace(lora, targets=(target,)).fits, names)):
            raise ModelError(
                f"LoRA target {target!r} is no Linear layer of a block; expected {ALL}, or some "
                f"of {_listed(names)}"
            )
    differing = _taken_by_peft(lora.targets, found) ^ set(filter(lora.fits, names))
    if differing:
        raise ModelError(
            f"peft takes LoRA targets {', '.join(lora.targets)} of model_type "
            f"{found.config.model_type} otherwise, in what they say of {min(differing)}; "
            f"expected {ALL}, which leaves such ones out"
        )


def _taken_by_peft(targets: tuple[str, ...], found: Family) -> set[str]:
    """Returns what peft puts LoRA beside: in blocks by the name there.

    That need not be layers of these names: of families whose experts were once Linear layers it
    takes what is called as they were for the experts. Raises ModelError.
    """
    from peft import LoraConfig, get_peft_model

    from heteropp.models.hugging_face.family import LAYERS

    model = copy.deepcopy(found.model)
    try:
        with warnings.catch_warnings(action="ignore"):  # that it asks transformers by an old name
            get_peft_model(model, LoraConfig(target_modules=list(targets)))
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ModelError(f"peft refuses LoRA targets {', '.join(targets)}: {text}") from error
    prefix = f"{model.base_model_prefix}.{LAYERS}."
    return {
        name.removeprefix(prefix).partition(".")[2] if name.startswith(prefix) else name
        for name, module in model.named_modules()
        if hasattr(module, A)
    }


def _parse(text: str) -> tuple[int, float, tuple[str, ...]]:
    """Returns rank, alpha and targets, which may be (). Raises ModelError."""
    given: dict[str, str] = {}
    for setting in text.split(","):
        key, _, value = setting.partition("=")
        if key not in ("r", "alpha", "targets") or not value:
            raise ModelError(f"LoRA has setting {setting!r}; expected {EXPECTED}")
        if key in given:
            raise ModelError(f"LoRA has setting {key} twice")
        given[key] = value
    rank = given.get("r", "")
    if not rank.isdecimal() or int(rank) < 1:
        raise ModelError(f"LoRA's r is {rank or 'missing'}; expected a whole number of at least 1")
    alpha = given.get("alpha", str(2 * int(rank)))
    if not alpha.isdecimal() or int(alpha) < 1:
        raise ModelError(f"LoRA's alpha is {alpha}; expected a whole number of at least 1")
    targets = tuple(given["targets"].split("+")) if "targets" in given else ()
    return int(rank), float(alpha), targets


def _listed(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
