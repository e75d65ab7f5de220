"""The truth that training is held against: one process, plain modules, a plain loop."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heteropp.model import Model
from heteropp.training.data import Tokens
from heteropp.training.llama import initial_value, model_parameters


class Norm(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.hidden))
        self.epsilon = model.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


class Attention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = model.heads, model.kv_heads, model.head_size
        self.theta, self.length = model.rope_theta, model.sequence_length
        kv = model.kv_heads * model.head_size
        self.query = nn.Linear(model.hidden, model.hidden, bias=False)
        self.key = nn.Linear(model.hidden, kv, bias=False)
        self.value = nn.Linear(model.hidden, kv, bias=False)
        self.output = nn.Linear(model.hidden, model.hidden, bias=False)

    def rotary(self, x: Tensor) -> Tensor:
        half = self.size // 2
        frequency = self.theta ** (-torch.arange(half).double() / half)
        angle = torch.arange(x.shape[1]).double()[:, None, None] * frequency
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right = x[..., :half], x[..., half:]
        turned_left = torch.addcmul(left * cosine, right, -sine)
        turned_right = torch.addcmul(right * cosine, left, sine)
        return torch.cat((turned_left, turned_right), -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = len(x) // self.length, self.length
        query = self.rotary(self.query(x).view(batch, length, self.heads, self.size))
        key = self.rotary(self.key(x).view(batch, length, self.kv_heads, self.size))
        value = self.value(x).view(batch, length, self.kv_heads, self.size)
        # the heads that share a key stand below each other: [batch, kv heads, group x length, size]
        query = query.transpose(1, 2).reshape(batch, self.kv_heads, -1, self.size)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        scores = query @ key.transpose(2, 3) * self.size**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        future = future.repeat(self.heads // self.kv_heads, 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = (weights @ value).view(batch, self.heads, length, self.size)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.intermediate, bias=False)
        self.up = nn.Linear(model.hidden, model.intermediate, bias=False)
        self.down = nn.Linear(model.intermediate, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(model), Attention(model)
        self.mlp_norm, self.mlp = Norm(model), MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainLlama(nn.Module):
    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = Norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self.load_state_dict(
            {p.name: initial_value(model, p, seed) for p in model_parameters(model)}
        )
        self.to(getattr(torch, model.dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.flatten())  # [sequences x length, hidden]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train_plainly(
    model: Model,
    tokens: Tokens,
    steps: int,
    micro_batch: int,
    micro_batches: int,
    learning_rate: float,
    warmup_steps: int,
    clip: float,
    seed: int = 0,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms before clipping, and parameters at the end."""
    torch.set_num_threads(1)
    module = PlainLlama(model, seed)
    optimizer = torch.optim.AdamW(
        module.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    count = micro_batch * micro_batches
    losses, norms = [], []
    for step in range(steps):
        rate = learning_rate * min(1, (step + 1) / warmup_steps)
        if step >= warmup_steps:
            progress = (step - warmup_steps) / (steps - warmup_steps)
            rate *= 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        optimizer.param_groups[0]["lr"] = rate
        batch = torch.from_numpy(tokens.sequences(seed, step, range(count), model.sequence_length))
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=getattr(torch, model.dtype))
        for sequences in batch.split(micro_batch):
            logits = module(sequences[:, :-1])
            total = F.cross_entropy(logits, sequences[:, 1:].flatten(), reduction="sum")
            mean = total / (count * model.sequence_length)
            mean.backward()
            loss += mean.detach()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in module.named_parameters()}
