"""A Llama-like model trained on a neutral chip gives the CPU's bits."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ditorch

VOCABULARY, WIDTH, HEADS, KV_HEADS, SEQUENCE = 64, 32, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.attention_norm, self.mlp_norm = (
            nn.RMSNorm(WIDTH, eps=1e-5),
            nn.RMSNorm(WIDTH, eps=1e-5),
        )
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * head, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2 * KV_HEADS, -1)).transpose(1, 2).chunk(2, 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        with sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(
            torch.arange(SEQUENCE, device=tokens.device),
            0.1 ** torch.arange(4, device=tokens.device),
        ).repeat(1, 2)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Model().to(device)
    # Left to itself torch takes the list operators on a chip and the single ones on the CPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(3):
        tokens = torch.randint(
            VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
        )
        tokens = tokens.to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


def test_three_steps_bit_for_bit() -> None:
    losses, parameters = train("device")
    expected_losses, expected_parameters = train("cpu")
    assert losses == expected_losses
    assert losses[2] < losses[0]
    for ours, theirs in zip(parameters, expected_parameters, strict=True):
        assert torch.equal(ours, theirs)
    assert not ditorch.is_emulated() or ditorch.pacing().busy_s > 0
