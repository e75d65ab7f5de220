"""A user's parts as modules: with initial values on the host, or as a rank holds them."""

from __future__ import annotations

import copy
import hashlib
from functools import lru_cache

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
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        module = make()
    if not isinstance(module, nn.Module):
        raise ModelError(f"{make} makes a {type(module).__name__}; expected an nn.Module")
    return module


def held_part(
    definition: ModelDefinition,
    part: str,
    group: TensorParallelGroup,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.Module:
    """Returns a part as one rank holds it, with uninitialised parameters."""
    module = copy.deepcopy(prototype(definition.makes()[part]))
    parameters = part_parameters(definition, part, module)
    return install(definition, part, module, parameters, group, device, dtype)


@lru_cache(maxsize=64)
def prototype(make: Make) -> nn.Module:
    """Returns a part with the values of its buffers, but only the shapes of its parameters."""
    module = initialised(make, "", 0)
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(parameter.to("meta")))
    return module
