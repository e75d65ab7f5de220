"""A small training run under Capture, for test_capture.py and test_depart.py: run as a script.

The argument is JSON: "output", other arguments of Capture under "capture", and "steps", "width",
"layers", "seed" and "fault" (what to plant).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ditorch  # noqa: F401
from ditorch.precision.capture import Capture

VOCABULARY, BATCH, SEQUENCE = 32, 4, 8


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        return self.out(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plant(fault: str) -> torch.library.Library | None:
    """Replaces a kernel of the chip below everything Capture can see."""
    if not fault:
        return None
    calls = 0
    library = torch.library.Library("aten", "IMPL")

    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        nonlocal calls
        calls += 1
        result = torch.softmax(x.cpu().double(), dim).to(x.dtype)
        if calls == 2:  # of layers.1, in the first step
            result = result * 1.01
        return result.to(x.device)

    def gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
        nonlocal calls
        calls += 1
        result = torch.ops.aten.gelu_backward(gradient.cpu(), x.cpu(), approximate=approximate)
        return (result * (1.5 if calls == 1 else 1.0)).to(x.device)  # layers.2's comes first

    kernels = {"softmax": ("_softmax", softmax), "gelu_backward": ("gelu_backward", gelu_backward)}
    name, kernel = kernels[fault]
    library.impl(name, kernel, "PrivateUse1")
    return library


def main(arguments: dict[str, Any]) -> None:
    planted = plant(arguments.get("fault", ""))
    torch.manual_seed(arguments.get("seed", 0))
    model = Model(arguments.get("width", 16), arguments.get("layers", 3)).to("device")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = arguments.get("capture", {})
    with Capture(output=Path(arguments["output"]), **chosen) as capture:
        for step in range(arguments.get("steps", 2)):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
            tokens = tokens.to("device")
            loss = nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, flush=True)
    print(capture.findings().summary, flush=True)
    del planted


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
