"""The truth that training is held against: one process, plain modules, a plain loop."""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heteropp.data.sequences import Sequences
from heteropp.data.targets import NOT_COUNTED
from heteropp.data.token_file import TokenFile
from heteropp.models.custom.model import CustomModel
from heteropp.models.custom.source import definition_at
from heteropp.models.hugging_face.config import family_config
from heteropp.models.hugging_face.family import base_name
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.llama.model import LlamaModel
from heteropp.models.spec import ModelSpec


class Norm(nn.Module):
    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.hidden))
        self.epsilon = model.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


class Attention(nn.Module):
    def __init__(self, model: LlamaModel) -> None:
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
    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.intermediate, bias=False)
        self.up = nn.Linear(model.hidden, model.intermediate, bias=False)
        self.down = nn.Linear(model.intermediate, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Dropout:
    """Drops an element where a hash of the seed, the place, its row and its column is small."""

    def __init__(self, model: LlamaModel, seed: int, place: str) -> None:
        self.probability = model.dropout
        digest = hashlib.sha256(f"{seed}/dropout/{place}".encode()).digest()
        self.key = int.from_bytes(digest[:4], "little") % 2**31

    def __call__(self, x: Tensor, first_row: int) -> Tensor:
        if not self.probability:
            return x
        row = np.arange(first_row, first_row + x.shape[0])[:, None]
        row = self.mix(self.mix(row % 2**31, 0) ^ (row >> 31), 1)
        column = self.mix(self.mix(np.arange(x.shape[1]), 1), 0)
        number = self.mix(self.mix(row ^ column ^ self.key, 0), 1)
        kept = torch.from_numpy(number >= round(self.probability * 2**31))
        return torch.where(kept, x * (1 / (1 - self.probability)), 0)

    @staticmethod
    def mix(number: np.ndarray, multiplier: int) -> np.ndarray:
        number = number * (0x7FEB352D, 0x2C1B3C6D)[multiplier]
        return (number >> 15 ^ number) & 0x7FFFFFFF


class Layer(nn.Module):
    def __init__(self, model: LlamaModel, seed: int, number: int) -> None:
        super().__init__()
        self.attention_dropout = Dropout(model, seed, f"layers.{number}.attention")
        self.mlp_dropout = Dropout(model, seed, f"layers.{number}.mlp")
        self.attention_norm, self.attention = Norm(model), Attention(model)
        self.mlp_norm, self.mlp = Norm(model), MLP(model)

    def forward(self, x: Tensor, first_row: int) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)), first_row)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), first_row)


class PlainLlama(nn.Module):
    def __init__(self, model: LlamaModel, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Layer(model, seed, n) for n in range(model.layers))
        self.embedding_dropout = Dropout(model, seed, "embedding")
        self.norm = Norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.fill({p.name: model.initial_value(p, seed) for p in model.parameters()})
        self.to(getattr(torch, model.dtype))

    def fill(self, values: dict[str, Tensor]) -> None:
        self.load_state_dict({"head.weight": values["embedding.weight"], **values})

    def forward(self, tokens: Tensor, first_row: int = 0) -> Tensor:
        """first_row: the first token's number in the whole run; dropout asks for it."""
        x = self.embedding(tokens.flatten())  # [sequences x length, hidden]
        x = self.embedding_dropout(x, first_row)
        for layer in self.layers:
            x = layer(x, first_row)
        return self.head(self.norm(x))


class PlainParts(nn.Module):
    """A user's own parts one after another, as they were written."""

    def __init__(self, model: CustomModel, seed: int) -> None:
        super().__init__()
        makes = definition_at(model.source).makes()
        self.embedding = makes["embedding"]()
        self.layers = nn.ModuleList(makes[kind]() for kind in model.order)
        self.head = makes["head"]()
        for name, other in model.tied.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, self.get_parameter(other))
        self.fill(dict(model.initial_values((0, model.layers), seed)))
        self.to(getattr(torch, model.dtype))

    @torch.no_grad()
    def fill(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(values[name])

    def forward(self, tokens: Tensor, first_row: int = 0) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


class TransformersDecoder(nn.Module):
    """transformers' own model, or peft's around it; its parameters have our names."""

    def __init__(self, model: HuggingFaceModel, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        config = copy.deepcopy(family_config(model.config))
        with torch.random.fork_rng():
            whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        whole.config._experts_implementation = "eager"
        self.has_auxiliary_loss = getattr(config, "output_router_logits", False)
        self.whole = whole.to(getattr(torch, model.dtype)).train()
        if model.lora is not None:
            from peft import LoraConfig, get_peft_model

            settings = LoraConfig(
                r=model.lora.rank,
                lora_alpha=int(model.lora.alpha),
                target_modules=list(model.lora.targets),
                task_type="CAUSAL_LM",
            )
            get_peft_model(self.whole, settings, autocast_adapter_dtype=False)  # in its place
        self.fill(dict(model.initial_values((0, model.layers), seed)))

    def own_name(self, name: str) -> str:
        name = name.removeprefix(f"{base_name(self.whole)}.")
        return name.replace(".base_layer.", ".").replace(".default.", ".")

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.whole.named_parameters():
            yield self.own_name(name), parameter

    @torch.no_grad()
    def fill(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self.whole.state_dict().items():
            if (own := self.own_name(name)) in values:
                tensor.copy_(values[own])

    def tables(self, names: set[str]) -> dict[str, Tensor]:
        """Returns those that are part of the weights, and no step changes."""
        named = {self.own_name(name): table for name, table in self.whole.named_buffers()}
        return {name: table for name, table in named.items() if name in names}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        loaded = type(self.whole).from_pretrained(folder).state_dict()
        self.fill({self.own_name(name): tensor for name, tensor in loaded.items()})

    def forward(self, tokens: Tensor, first_row: int = 0) -> Tensor:
        found = self.whole(input_ids=tokens, use_cache=False)
        self.router_logits = found.router_logits if self.has_auxiliary_loss else ()
        return found.logits.flatten(0, 1)

    def auxiliary_loss(self, targets: Tensor) -> Tensor:
        """Transformers' loss of each sequence of the last forward as if it were a batch by itself,
        as often as it has targets that count, summed; targets: [sequences, length].
        """
        by_sequence = [each.chunk(len(targets)) for each in self.router_logits]
        function = inspect.getmodule(type(self.whole)).load_balancing_loss_func  # type: ignore[union-attr]
        losses = [
            function(of_one, self.whole.num_experts, self.whole.num_experts_per_tok)
            for of_one in zip(*by_sequence, strict=True)
        ]
        counted = (targets != NOT_COUNTED).sum(1)
        return self.whole.router_aux_loss_coef * (torch.stack(losses) * counted).sum()


Plain = PlainLlama | PlainParts | TransformersDecoder


def plain_module(model: ModelSpec, seed: int) -> Plain:
    if isinstance(model, CustomModel):
        return PlainParts(model, seed)
    if isinstance(model, HuggingFaceModel):
        return TransformersDecoder(model, seed)
    assert isinstance(model, LlamaModel)
    return PlainLlama(model, seed)


def decaying(model: ModelSpec, module: nn.Module) -> list[dict]:
    """The optimizer's groups: of all that decays, and of norms, biases and what a model excepts."""
    excepted = {parameter.name for parameter in model.parameters() if not parameter.decays}
    named = [(p, p.dim() > 1 and name not in excepted) for name, p in module.named_parameters()]
    groups = [
        {"params": [p for p, decays in named if decays], "weight_decay": 0.1},
        {"params": [p for p, decays in named if not decays], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(model: ModelSpec, module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(decaying(model, module), betas=(0.9, 0.95), eps=1e-8)]


@torch.no_grad()
def plain_loss(model: ModelSpec, parameters: dict[str, Tensor], tokens: TokenFile) -> float:
    """The mean loss over the whole of some tokens."""
    if isinstance(model, LlamaModel):
        model = replace(model, dropout=0.0)
    module = plain_module(model, 0)
    module.fill(parameters)
    sequences = Sequences(tokens, model)
    inputs, targets = map(torch.from_numpy, sequences.read(range(sequences.count)))
    loss = F.cross_entropy(module(inputs).double(), targets.flatten())
    if isinstance(module, TransformersDecoder) and module.has_auxiliary_loss:
        loss += module.auxiliary_loss(targets) / (targets != NOT_COUNTED).sum()
    return loss.item()


def train_plainly(
    model: ModelSpec,
    tokens: TokenFile,
    steps: int,
    micro_batch: int,
    micro_batches: int,
    learning_rate: float,
    warmup_steps: int,
    clip: float,
    seed: int = 0,
    without: int | None = None,
    weights: Path | None = None,
    optimizers_of: Callable[[ModelSpec, nn.Module], list[torch.optim.Optimizer]] = adamw,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms before clipping, and parameters at the end.

    without: a step that changes nothing; weights: transformers' folder to begin from.
    optimizers_of: their groups may have a "factor" of the learning rate.
    """
    torch.set_num_threads(1)
    module = plain_module(model, seed)
    if weights is not None:
        assert isinstance(module, TransformersDecoder)
        module.load(weights)
    optimizers = optimizers_of(model, module)
    count = micro_batch * micro_batches
    sequences = Sequences(tokens, model, seed)
    losses, norms = [], []
    first_row = 0
    for step in range(steps):
        rate = learning_rate * min(1, (step + 1) / warmup_steps)
        if step >= warmup_steps:
            progress = (step - warmup_steps) / (steps - warmup_steps)
            rate *= 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = rate * group.get("factor", 1.0)
        numbers = range(step * count, (step + 1) * count)
        inputs, targets = map(torch.from_numpy, sequences.read(numbers))
        counted = int((targets != NOT_COUNTED).sum())
        module.zero_grad()
        loss = torch.zeros((), dtype=getattr(torch, model.dtype))
        for ours, theirs in zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True):
            logits = module(ours, first_row)
            first_row += ours.numel()
            total = F.cross_entropy(logits, theirs.flatten(), reduction="sum")
            if isinstance(module, TransformersDecoder) and module.has_auxiliary_loss:
                total = total + module.auxiliary_loss(theirs)
            mean = total / counted
            mean.backward()
            loss += mean.detach()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip).item())
        if step != without:
            for optimizer in optimizers:
                optimizer.step()
        losses.append(loss.item())
    values = {name: p.detach() for name, p in module.named_parameters()}
    if isinstance(module, TransformersDecoder):
        values |= module.tables({parameter.name for parameter in model.parameters()})
    return losses, norms, values
