"""The initial values of a family's weights, by the family's own rules."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from heteropp.models.hugging_face.family import family

if TYPE_CHECKING:
    from heteropp.models.hugging_face.model import HuggingFaceModel


@torch.no_grad()
def initial_values(
    model: HuggingFaceModel, layers: tuple[int, int], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields a stage's parameters by their names, whole and on the host.

    They depend on the seed and the name of their part alone.
    """
    found = family(model.config)
    wanted = {model.global_name(p.name): p.name for p in model.parameters(layers)}
    parts: dict[str, nn.Module] = {
        "embed_tokens.": found.base.embed_tokens,
        **{f"layers.{i}.": found.base.layers[found.source(model.order[i])] for i in range(*layers)},
        "norm.": found.base.norm,
        "lm_head.": found.model.get_output_embeddings(),
    }
    for prefix, module in parts.items():
        if not any(name.startswith(prefix) for name in wanted):
            continue
        digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
        made = copy.deepcopy(module).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:4], "little"))
            for each in made.modules():
                found.model._init_weights(each)
        for name, value in made.state_dict().items():
            if (own := wanted.get(f"{prefix}{name}")) is not None:
                yield own, value.detach()
