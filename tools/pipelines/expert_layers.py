"""A layer of experts that lie over ranks, ours and as a plain PyTorch program writes it.

Both route alike, and exchange rows by all-to-alls of uneven parts. The plain one is what tutorials
show: counts and rows by all_to_all_single, and each expert's two products in a loop.
"""

from __future__ import annotations

from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

HIDDEN, INTERMEDIATE = 256, 512
EXPERTS, OF_A_ROW = 8, 2
ROWS = 1024  # of each rank


class ExpertLayer:
    """One rank's share of a layer, the same experts and rows for every contestant."""

    def __init__(self, rank: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int) -> Tensor:
            return 0.05 * torch.randn(*sizes, generator=generator)

        self.router = normal(HIDDEN, EXPERTS)
        gate_up = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN)
        down = normal(EXPERTS, HIDDEN, INTERMEDIATE)
        self.each = EXPERTS // ranks
        own = slice(rank * self.each, (rank + 1) * self.each)
        self.gate_up = gate_up[own].clone().requires_grad_()
        self.down = down[own].clone().requires_grad_()
        self.x = 20 * normal(ranks, ROWS, HIDDEN)[rank]

    def step(self) -> float:
        """Runs forward and backward; returns the loss of this rank's rows."""
        x = self.x.clone().requires_grad_()
        weights, chosen = torch.softmax(x @ self.router, -1).topk(OF_A_ROW)
        loss = self.computed(x, chosen, weights).square().mean()
        loss.backward()
        self.gate_up.grad = self.down.grad = None
        return loss.item()

    def computed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns what experts make of rows, weighed, [rows, hidden]."""
        raise NotImplementedError


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class OurExperts(ExpertLayer):
    """heteropp's function for the experts of transformers' modules."""

    def __init__(self, rank: int, ranks: int) -> None:
        from heteropp.models.parallel.expert_parallel import ExpertProcessGroup

        super().__init__(rank, ranks)
        parts = {i: (i * self.each, (i + 1) * self.each) for i in range(ranks)}
        world = dist.group.WORLD
        assert world is not None
        self.module = SimpleNamespace(
            num_experts=EXPERTS,
            has_gate=True,
            is_transposed=False,
            has_post_expert_norm=False,
            gate_up_proj=self.gate_up,
            down_proj=self.down,
            _apply_gate=gated,
            expert_group=ExpertProcessGroup(world, parts),
            expert_layer=0,
        )

    def computed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        from heteropp.models.hugging_face.experts import experts

        return experts(self.module, x, chosen, weights)


class PlainExperts(ExpertLayer):
    """A plain program's."""

    def computed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // OF_A_ROW]
        sent = torch.bincount(chosen.flatten(), minlength=EXPERTS).view(-1, self.each)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent)  # by rank, then expert
        to, of = sent.sum(1).tolist(), coming.sum(1).tolist()
        world = dist.group.WORLD
        came = all_to_all_single_autograd(rows, of, to, world)
        by_rank = came.split(coming.flatten().tolist())
        results: list[Tensor] = [came] * len(by_rank)
        for i in range(self.each):
            mine = by_rank[i :: self.each]
            y = gated(F.linear(torch.cat(mine), self.gate_up[i]))
            y = F.linear(y, self.down[i])
            results[i :: self.each] = y.split([len(part) for part in mine])
        back = all_to_all_single_autograd(torch.cat(results), to, of, world)
        weighed = back * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // OF_A_ROW, weighed)


class ExpertRank:
    """A rank of one contestant."""

    def __init__(self, backend: str, ranks: int, plain: bool, rank: int, store: Any) -> None:
        from heteropp.runtime.ranks.transport import connect

        if backend == "dicomm":
            import dicomm.distributed  # noqa: F401
        connect(store, rank, ranks, backend)
        self.layer = (PlainExperts if plain else OurExperts)(rank, ranks)

    def step(self, _name: str) -> tuple[float, float, float]:
        """Runs a step; returns its seconds, those that this rank computed, and its loss."""
        dist.barrier()
        start_s, start_cpu_s = perf_counter(), process_time()
        loss = self.layer.step()
        dist.barrier()
        return perf_counter() - start_s, process_time() - start_cpu_s, loss
