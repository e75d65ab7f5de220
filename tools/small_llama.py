"""A small Llama in training, for benchmarks: at the smallest, launches are most of its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def training_step(
    device: torch.device, *, dim: int, length: int, layers: int = 2
) -> Callable[[], None]:
    """A whole step on 4 sequences of `length` tokens, which ends when the chip has done it."""
    import torch
    import torch.nn.functional as F

    from ditorch.align.example import Llama, make_tokens

    torch.manual_seed(0)
    model = Llama(layers=layers, dim=dim, heads=4, length=length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = make_tokens(1, 4, length)[0].to(device)

    def step() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the chip

    return step
