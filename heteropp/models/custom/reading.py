"""Makes the model that plans contain of what a user wrote, once all of it was checked."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

from torch import Tensor, nn

from heteropp.models.custom.checks import check_forward
from heteropp.models.custom.cutting import part_parameters, unused_rules
from heteropp.models.custom.definition import ModelDefinition
from heteropp.models.custom.model import CustomModel, Part
from heteropp.models.custom.parts import prototype
from heteropp.models.custom.source import definition_at
from heteropp.models.spec import ModelError, Parameter

MOST_TP = 64  # of which the smallest that is possible is tried


def read(source: str) -> CustomModel:
    """Returns the model that a function in a file defines. Raises ModelError."""
    definition = definition_at(source)
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
        if (one.shape, one.split_dimension) != (two.shape, two.split_dimension):
            raise ModelError(f"{name} is tied to {other}, which is of another shape or cut")


def _check_tp(model: CustomModel, definition: ModelDefinition) -> None:
    """Tries the smallest degree that the sizes allow: does the code behind cut layers take it?"""
    degrees = model.tp_degrees(MOST_TP)[1:]
    if not degrees:
        return
    degree = degrees[0]
    try:
        _, last = check_forward(definition, PlannedGroup(degree))
    except ModelError as error:
        raise ModelError(f"with tensor-parallel degree {degree}, {error}") from error
    if definition.loss is not None and last != model.vocab:
        raise ModelError("a loss of its own needs whole logits; cut the head's last layer not")


def _digest(file: Path, modules: dict[str, nn.Module]) -> str:
    """Returns a digest of the files in which the parts are written: what a stage costs may change
    with them.
    """
    files = {file.resolve()}
    for module in modules.values():
        for each in module.modules():
            found = None if each.__module__.startswith("torch") else _file(type(each))
            if found is not None:
                files.add(found)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _file(kind: type) -> Path | None:
    try:
        found = inspect.getsourcefile(kind)
    except TypeError:
        return None
    return Path(found).resolve() if found else None
