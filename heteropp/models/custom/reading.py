"""Makes the model that plans contain of what a user wrote, once all of it was checked."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from torch import Tensor, nn

from heteropp.models.custom.checks import check_forward, check_loss
from heteropp.models.custom.cutting import part_parameters, unused_rules
from heteropp.models.custom.definition import ModelDefinition
from heteropp.models.custom.model import CustomModel
from heteropp.models.custom.parts import prototype
from heteropp.models.custom.source import definition_at
from heteropp.models.parted import Part
from heteropp.models.spec import LARGEST, Dtype, ModelError, Parameter

MOST_TP = 64


def read(source: str) -> CustomModel:
    """Returns the model that a function in a file defines. Raises ModelError."""
    definition = definition_at(source)
    _check_types(definition)
    file, _, name = source.rpartition(":")
    modules = _modules(definition)
    parts = tuple(
        Part(part, tuple(part_parameters(definition, part, module)))
        for part, module in modules.items()
    )
    for pattern in unused_rules(definition, modules):
        raise ModelError(f"{pattern!r} fits the name of no layer and no parameter")
    hidden, vocab = check_forward(definition)
    model = CustomModel(
        name=definition.name,
        layers=len(definition.order),
        hidden=hidden,
        vocab=vocab,
        sequence_length=definition.sequence_length,
        dtype=definition.dtype,
        source=f"{Path(file).resolve()}:{name}",
        code_sha256=_digest(Path(file), modules),
        order=tuple(definition.order),
        parts=parts,
        tied_names=tuple(definition.tied.items()),
        is_cut=definition.cut is not None,
        tp_divides=tuple(definition.tp_divides.items()),
    )
    check_loss(definition, vocab)
    _check_ties(model, definition)
    _check_tp(model, definition)
    return model


class PlannedGroup:
    """The first rank of a group that communicates nothing."""

    index = 0
    sequence_parallel = False

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        pass

    def all_gather(self, output: Tensor, piece: Tensor) -> None:
        pass

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> None:
        pass


def _check_types(definition: ModelDefinition) -> None:
    for name, kind in (("name", str), ("sequence_length", int)):
        if not isinstance(getattr(definition, name), kind):
            raise ModelError(f"{name} is {getattr(definition, name)!r}; expected {kind.__name__}")
    if not 1 <= definition.sequence_length <= LARGEST:
        raise ModelError(
            f"sequence_length is {definition.sequence_length}; expected 1 to {LARGEST}"
        )
    if definition.dtype not in get_args(Dtype):
        raise ModelError(
            f"dtype is {definition.dtype!r}; expected one of {', '.join(get_args(Dtype))}"
        )
    for name in ("blocks", "cut", "tied", "tp_divides"):
        value = getattr(definition, name)
        if name == "cut" and value is None:
            continue
        if not isinstance(value, Mapping) or not _are_names(value):
            raise ModelError(f"{name} is {value!r}; expected a dictionary by name")
    if not _are_names(definition.tied.values()):
        raise ModelError(f"tied is {definition.tied!r}; expected names of parameters by name")
    for name in ("order", "no_weight_decay"):
        value = getattr(definition, name)
        if isinstance(value, str) or not isinstance(value, Sequence) or not _are_names(value):
            raise ModelError(f"{name} is {value!r}; expected a list of names")
    for part, make in definition.makes().items():
        if not callable(make) or isinstance(make, nn.Module):
            raise ModelError(
                f"{part} is a {type(make).__name__}; expected what makes a module, such as a class"
            )
    for name, size in definition.tp_divides.items():
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"tp_divides has {name} {size!r}; expected a positive number")


def _are_names(values: Iterable[object]) -> bool:
    return all(isinstance(each, str) for each in values)


def _modules(definition: ModelDefinition) -> dict[str, nn.Module]:
    if not definition.order:
        raise ModelError("order is empty; expected at least one block")
    for kind in definition.order:
        if kind not in definition.blocks:
            raise ModelError(f"order has {kind!r}; blocks are {', '.join(definition.blocks)}")
    for kind in definition.blocks:
        if kind in ("embedding", "head") or "." in kind:
            raise ModelError(f"a block's kind is {kind!r}, which names something else")
        if kind not in definition.order:
            raise ModelError(f"blocks has {kind!r}, which order does not")
    modules = {}
    for name, make in definition.makes().items():
        module = prototype(make)
        if not any(True for _ in module.parameters()):
            raise ModelError(f"{name} has no parameters; make it a part of another")
        for parameter in module.parameters():
            if not parameter.requires_grad:
                raise ModelError(f"{name} has a parameter that requires no gradient")
        modules[name] = module
    return modules


def _check_ties(model: CustomModel, definition: ModelDefinition) -> None:
    known: dict[str, Parameter] = {
        f"{part.name}.{p.name}": p for part in model.parts for p in part.parameters
    }
    for name, other in definition.tied.items():
        for each, part in ((name, "head"), (other, "embedding")):
            if each not in known or not each.startswith(f"{part}."):
                raise ModelError(f"tied names {each!r}; expected a parameter of the {part}")
        one, two = known[name], known[other]
        if replace(one, name="") != replace(two, name=""):
            raise ModelError(
                f"{name} is tied to {other}, which is of another shape, cut or weight decay"
            )


def _check_tp(model: CustomModel, definition: ModelDefinition) -> None:
    """Tries every degree that the sizes allow: does the code behind cut layers take it?"""
    for degree in model.tp_degrees(MOST_TP)[1:]:
        try:
            _, last = check_forward(definition, PlannedGroup(degree))
        except ModelError as error:
            raise ModelError(
                f"with tensor-parallel degree {degree}, {error}; tp_divides names what else a "
                "degree must divide, such as the heads"
            ) from error
        if definition.loss is not None and last != model.vocab:
            raise ModelError("a loss of one's own needs whole logits: leave the head uncut")


def _digest(file: Path, modules: dict[str, nn.Module]) -> str:
    """Returns a digest of the files in which the parts are written: what a stage costs may change
    with them.
    """
    files = {file.resolve(), *_imported_beside(file.resolve().parent)}
    for module in modules.values():
        for each in module.modules():
            found = None if each.__module__.startswith("torch") else _file(type(each))
            if found is not None:
                files.add(found)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _imported_beside(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder that were imported: a part may compute with any of them."""
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if name and folder in Path(name).parents and "site-packages" not in name:
            yield Path(name)


def _file(kind: type) -> Path | None:
    try:
        found = inspect.getsourcefile(kind)
    except TypeError:
        return None
    return Path(found).resolve() if found else None
