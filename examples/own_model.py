"""Plans and trains a model of one's own, which is no Llama, over chips of four vendors.

python examples/own_model.py            plans it, simulates a step, and trains 20 steps
heteropp-search --model examples/own_model.py:model --cluster quickstart --global-batch 16
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

import heteropp

WIDTH, HEADS, LENGTH, VOCAB = 64, 4, 64, 256


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """Pre-norm attention and MLP with biases; `inner` makes the blocks unlike."""

    mask: Tensor

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, WIDTH // HEADS))  # -1: a rank's heads
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # [sequences, heads, length, ..]
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + self.mask
        return self.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def model() -> heteropp.ModelDefinition:
    cut = {"embedding.tokens": "vocabulary", "*.qkv": ("packed", 3), "*.output": "row"}
    cut |= {"*.up": "column", "*.down": "row", "head.logits": "column", "*": "replicated"}
    return heteropp.ModelDefinition(
        name="own-model",
        sequence_length=LENGTH,
        embedding=Embedding,
        blocks={"narrow": partial(Block, 2 * WIDTH), "wide": partial(Block, 6 * WIDTH)},
        order=["narrow", "wide"] * 4,
        head=Head,
        cut=cut,
        tp_divides={"heads": HEADS},
        no_weight_decay=["*.bias", "*norm.weight", "embedding.positions"],
    )


if __name__ == "__main__":
    plan = heteropp.plan(model, "quickstart", global_batch=16)
    print(f"predicted: {heteropp.simulate(plan, 'quickstart', emulated=True).step_s:.3f} s a step")
    heteropp.train(plan, "quickstart", steps=20, output="runs/own-model")
