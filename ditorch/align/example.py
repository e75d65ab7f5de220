"""A small Llama trained on one chip: what `ditorch-align run` runs when it is given no script.

    DITORCH_CHIP=b python -m ditorch.align.example --steps 300

The initial weights and the data are made on the host, so every chip trains the same model on the
same tokens; what differs between two chips' losses is their arithmetic.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ditorch

VOCABULARY = 64


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale * self.weight


class Attention(nn.Module):
    """Causal self-attention over (batch, length, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, future: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        q, k = rotate(q, rotation), rotate(k, rotation)  # (batch, heads, length, head dim)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores.masked_fill_(future, float("-inf"))
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, heads)
        self.feed_forward_norm, self.feed_forward = RMSNorm(dim), FeedForward(dim, 3 * dim)

    def forward(self, x: Tensor, rotation: Tensor, future: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, future)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Token numbers (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, layers: int, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.register_buffer("rotation", rotation_of(length, dim // heads))
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation, self.future)
        return self.head(self.norm(x))


def rotation_of(length: int, head_dim: int) -> Tensor:
    """Cosines and sines of the rotary embedding, (2, length, head_dim / 2)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(length), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def make_tokens(batches: int, batch: int, length: int) -> Tensor:
    """(batches, batch, length + 1) tokens of a language in which two tokens foretell the next."""
    after = torch.randint(VOCABULARY, (16, 16, 4))  # four choices after each pair of kinds
    choices = torch.randint(4, (batches, batch, length + 1))
    tokens = torch.randint(VOCABULARY, (batches, batch, length + 1))
    for i in range(2, length + 1):
        kinds = tokens[..., i - 2] % 16, tokens[..., i - 1] % 16
        tokens[..., i] = after[kinds].gather(-1, choices[..., i : i + 1]).squeeze(-1)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small Llama on this process's chip.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--gain", type=float, default=1.0, help="factor on the initial weights")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model = Llama(options.layers, options.dim, options.heads, options.length)
    for matrix in model.parameters():
        if matrix.dim() == 2:
            matrix.data *= options.gain
    model.to("device", getattr(torch, options.dtype))
    tokens = make_tokens(options.steps, options.batch, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    began_s = time.monotonic()
    for step, batch in enumerate(tokens):
        batch = batch.to("device")
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            took_s = time.monotonic() - began_s
            print(f"step {step:4}  loss {loss.item():.4f}  {took_s:.1f} s", flush=True)
    print(f"trained {options.steps} steps on {ditorch.device}")


if __name__ == "__main__":
    main()
