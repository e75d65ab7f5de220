"""A user's parts as modules: with initial values on the host, or as a rank holds them."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from heteropp.models.custom.cutting import install, part_parameters
from heteropp.models.custom.definition import Make, ModelDefinition
from heteropp.models.parallel.tensor_parallel import TensorParallelGroup
from heteropp.models.spec import ModelError


def initialised(make: Make, name: str, seed: int) -> nn.Module:
    """Returns a part with its initial values, whole and on the host.

    They depend on the seed and the part's name alone, such as "layers.17".
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with _seeded(int.from_bytes(digest[:4], "little")), torch.device("cpu"):
        try:
            module = make()
        except Exception as error:
            raise ModelError(f"{make} fails: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{make} makes a {type(module).__name__}; expected an nn.Module")
    return module


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds what draws random numbers, and gives back its state."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def held_part(
    definition: ModelDefinition,
    part: str,
    group: TensorParallelGroup,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.Module:
    """Returns a part as one rank holds it, with uninitialised parameters."""
    whole = prototype(definition.makes()[part])
    try:
        module = copy.deepcopy(whole)
    except Exception as error:  # of whatever a user's module has
        text = " ".join(str(error).split())
        raise ModelError(f"{part} cannot be copied: {type(error).__name__}: {text}") from error
    parameters = part_parameters(definition, part, module)
    return install(definition, part, module, parameters, group, device, dtype)


def _check_own(module: nn.Module) -> None:
    """Raises ModelError where two layers have one parameter: each would get its own."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(name.rpartition(".")[0])
        first, first_name = owners.setdefault(id(parameter), (owner, name))
        if first is not owner:
            raise ModelError(f"{first_name} and {name} are one parameter; expected one each")


@lru_cache(maxsize=64)
def prototype(make: Make) -> nn.Module:
    """Returns a part with the values of its buffers, but only the shapes of its parameters."""
    module = initialised(make, "", 0)
    _check_own(module)
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(parameter.to("meta")))
    return module
