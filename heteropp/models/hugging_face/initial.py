"""The initial values of a family's weights, by the family's own rules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heteropp.models.hugging_face.cuts import kept_buffers
from heteropp.models.hugging_face.family import LAYERS, family

if TYPE_CHECKING:
    from heteropp.models.hugging_face.model import HuggingFaceModel


@torch.no_grad()
def initial_values(
    model: HuggingFaceModel, layers: tuple[int, int], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields a stage's parameters by their names, whole and on the host.

    They depend on the seed and the name of their part alone.
    """
    from transformers.activations import XIELUActivation

    found = family(model.config)
    wanted = {model.global_name(p.name): p.name for p in model.parameters(layers)}
    parts = {name: name for name in (*found.first, *found.last, found.head_name)}
    for i in range(*layers):
        parts[f"{LAYERS}.{i}"] = f"{LAYERS}.{found.source(model.order[i])}"
    numbers = {f"{LAYERS}.{i}": i for i in range(*layers)}
    for name, like in parts.items():
        if not any(each.startswith(f"{name}.") for each in wanted):
            continue
        digest = hashlib.sha256(f"{seed}/{name}.".encode()).digest()
        made = found.copy_of(found.module(like)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(int.from_bytes(digest[:4], "little"))
            for each in made.modules():
                if hasattr(each, "layer_idx"):  # of which decays of linear attention are made
                    each.layer_idx = numbers[name]
                if isinstance(each, XIELUActivation):  # which has its values as it is made
                    each.load_state_dict(XIELUActivation(dtype=each.beta.dtype).state_dict())
                found.model._init_weights(each)
        for key, value in {**dict(made.named_parameters()), **kept_buffers(made)}.items():
            if (own := wanted.get(f"{name}.{key}")) is not None:
                yield own, value.detach()
