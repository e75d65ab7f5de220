"""Tensor parallelism by declaration: plain modules do what models.parallel's layers are called for.

A parameter says how its layer is cut, and so where communication stands. A Linear layer cut along
its outputs takes copies of the rows, so that the backward sums their gradients; one cut along its
inputs, and an embedding cut along its vocabulary, give sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from heteropp.layout.hspmd.annotation import DUPLICATE, Annotation, AnnotationError
from heteropp.layout.parameter import Parameter


def rows(
    groups: Sequence[Sequence[int]],
    shares: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> Annotation:
    """Returns how activations lie between layers: each tensor-parallel group has its share of
    dimension 0, in copies or, with sequence parallelism, cut over its ranks.

    shares: by group, as sizes or fractions of their sum; None: equal ones. Raises AnnotationError.
    """
    dimension = 0 if sequence_parallel else DUPLICATE
    return Annotation.of([(ranks, {dimension: len(ranks)}) for ranks in groups], 0, shares)


def declared(
    module: nn.Module,
    parameters: Iterable[Parameter],
    groups: Sequence[Sequence[int]],
    shares: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> dict[str, dict[str, Annotation]]:
    """Returns the arguments by which `annotate` makes a module that is written for one device
    tensor-parallel.

    parameters: of the module, under its names, such as a model spec's.
    groups, shares, sequence_parallel: see `rows`, which is how the module's input must lie. The
    result of a layer cut along its outputs stays cut: a loss that sees all classes needs
    `outputs` for the head as well.
    Raises AnnotationError for a layer that is cut in no such way.
    """
    between, copies = rows(groups, shares, sequence_parallel), rows(groups, shares)
    found: dict[str, dict[str, Annotation]] = {"parameters": {}, "inputs": {}, "outputs": {}}
    for parameter in parameters:
        found["parameters"][parameter.name] = parameter.annotation(groups)
        name, _, leaf = parameter.name.rpartition(".")
        cut = parameter.split_dimension
        if cut is None or leaf == "bias":
            continue
        layer = module.get_submodule(name)
        if type(layer) is nn.Linear and cut == 0 and not parameter.packed:
            found["inputs"][name] = copies
        elif type(layer) is nn.Linear and cut == 1:
            found["outputs"][name] = between
        elif type(layer) is nn.Embedding and cut == 0:
            found["inputs"][name], found["outputs"][name] = copies, between
        else:
            raise AnnotationError(
                f"parameter {parameter.name} of a {type(layer).__name__} is cut along dimension "
                f"{cut}; expected a Linear layer's in one piece, or an Embedding's vocabulary"
            )
    return found
