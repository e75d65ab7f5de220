"""Layers whose sequence is cut over ranks: by heteropp, and by PyTorch's context_parallel.

Both run the same modules on the same sequence. heteropp cuts it into parts of equal work, as it
does for chips that are alike, and each rank is sent the keys and values before its part. PyTorch
gives each rank a piece of the head and one of the tail, and passes keys and values on in a ring or
gathers them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.models.llama.model import LlamaModel
from heteropp.models.parallel.tensor_parallel import SoloGroup
from pipelines.torch_ring import teach

MODEL = LlamaModel(
    name="Llama-like",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=4,
    intermediate=704,
    vocab=32,
    sequence_length=4096,
    attention="fused",
)
LAYERS = 1, 3  # that are run: with neither embedding nor head
WAYS = {"context parallel": None, "torch allgather": "allgather", "torch alltoall": "alltoall"}


class ContextLayers:
    """One rank's part of the sequence in the layers, the same for every contestant."""

    def __init__(self, model: LlamaModel, rank: int, ranks: int, rotated: str | None) -> None:
        """rotated: how PyTorch passes keys and values on; None: heteropp cuts the sequence."""
        generator = torch.Generator().manual_seed(0)
        length, hidden = model.sequence_length, model.hidden
        self.elements = length * hidden
        self.x = torch.randn(length, hidden, generator=generator)
        self.tokens = torch.arange(length)  # that are this rank's
        if rotated is None:
            self._cut(model, rank, ranks)
        else:
            self._cut_by_torch(model, ranks, rotated)
        self.module.initialise(seed=0)

    def _cut(self, model: LlamaModel, rank: int, ranks: int) -> None:
        from heteropp import token_shares
        from heteropp.models.parallel.context_parallel import ContextProcessGroup

        if ranks == 1:
            group = None
        else:
            world = dist.group.WORLD
            assert world is not None
            ends = accumulate(token_shares(model, [1.0] * ranks), initial=0)
            group = ContextProcessGroup(world, tuple(pairwise(ends)))
            own = slice(*group.parts[rank])
            self.x, self.tokens = self.x[own], self.tokens[own]
        self.module = model.build(LAYERS, SoloGroup(), "cpu", torch.float32, context=group)

    def _cut_by_torch(self, model: LlamaModel, ranks: int, rotated: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        from heteropp.models.llama.stage import SharedConstants

        teach()
        own = replace(model, sequence_length=model.sequence_length // ranks)
        self.module = own.build(LAYERS, SoloGroup(), "cpu", torch.float32)
        tables = SharedConstants(model, torch.device("cpu"), torch.float32)
        self.module.tables = tables
        set_rotate_method(rotated)
        buffers = [self.x, self.tokens, tables.cosine, tables.sine]
        # it is left in force: a step cuts nothing anew, as ours does not
        self.context = context_parallel(
            init_device_mesh("cpu", (ranks,)),
            buffers=buffers,
            buffer_seq_dims=[0] * len(buffers),
            no_restore_buffers=set(buffers),
        )
        self.context.__enter__()

    def step(self) -> float:
        """Runs forward and backward; returns this rank's share of the loss."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self.x.requires_grad_().grad = None
        loss = self.module(self.x).square().sum() / self.elements
        loss.backward()
        return loss.item()

    def gradients(self) -> dict[str, Tensor]:
        """Returns the last step's gradients: of weights, and of the tokens where they belong."""
        found = {name: p.grad for name, p in self.module.named_parameters()}
        of_x = torch.zeros(self.elements // self.x.shape[1], self.x.shape[1])
        assert self.x.grad is not None
        of_x[self.tokens] = self.x.grad
        return {**found, "x": of_x}  # type: ignore[dict-item]


class ContextRank:
    """A rank of one contestant."""

    def __init__(
        self, model: LlamaModel, backend: str, ranks: int, name: str, rank: int, store: Any
    ) -> None:
        from heteropp.runtime.ranks.transport import connect

        if backend == "dicomm":
            import dicomm.distributed  # noqa: F401
        connect(store, rank, ranks, backend)
        self.layers = ContextLayers(model, rank, ranks, WAYS[name])

    def step(self, _name: str) -> tuple[float, float, float]:
        """Runs a step; returns its seconds, those that this rank computed, and the whole loss."""
        dist.barrier()
        start_s, start_cpu_s = perf_counter(), process_time()
        loss = self.layers.step()
        dist.barrier()
        taken_s, cpu_s = perf_counter() - start_s, process_time() - start_cpu_s
        whole = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(whole)
        return taken_s, cpu_s, whole.item()

    def gradients(self) -> dict[str, Any]:
        """Returns those of the last step, summed over the ranks, as arrays."""
        found = self.layers.gradients()
        for gradient in found.values():
            dist.all_reduce(gradient)
        return {name: gradient.numpy() for name, gradient in found.items()}
