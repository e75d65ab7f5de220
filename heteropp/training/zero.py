"""ZeRO-1: parameters and gradients in flat buffers, the optimizer's state cut over the replicas.

The replicas of a stage hold the same parameters. Gradients are reduce-scattered, each replica
updates its shard, and the parameters are all-gathered. With ZeRO stage 0, or one replica, the
shard is the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.hyperparameters import Hyperparameters
from heteropp.training.collective import all_gather, reduce_scatter
from heteropp.training.llama import StageModule, model_parameters
from heteropp.training.optimizer import AdamW

ALIGNMENT = 32  # elements; kernels may take another path, with other last bits, when unaligned


@dataclass(frozen=True)
class Entry:
    """A parameter's place in the flat buffer."""

    name: str
    first: int
    last: int
    sharded: bool  # over the tensor-parallel group; otherwise its ranks hold copies


class FlatParameters:
    """The parameters of a stage module as one rank holds them, moved into flat buffers."""

    def __init__(
        self,
        module: StageModule,
        group: dist.ProcessGroup | None,
        zero_stage: int,
        hyperparameters: Hyperparameters,
    ) -> None:
        self.group = group
        self.zero_stage = zero_stage
        shards = group.size() if group is not None and zero_stage == 1 else 1
        index = group.rank() if group is not None and zero_stage == 1 else 0
        parameters = dict(module.named_parameters())
        sharded = {
            parameter.name: parameter.split_dimension is not None and module.group.size > 1
            for parameter in model_parameters(module.model, module.layer_range)
        }
        self.entries, size = _layout(parameters, sharded)
        size = -(-size // (shards * ALIGNMENT)) * shards * ALIGNMENT
        self.shard = slice(index * size // shards, (index + 1) * size // shards)
        example = next(iter(parameters.values()))
        # a bfloat16 model sums its gradients and keeps a master copy in float32
        self.mixed = example.dtype == torch.bfloat16
        wide = torch.float32 if self.mixed else example.dtype
        self.values = torch.zeros(size, dtype=example.dtype, device=example.device)
        self.gradients = torch.zeros(size, dtype=wide, device=example.device)
        self._adopt(parameters)
        own = self.values[self.shard]
        self.master = own.float() if self.mixed else own
        self.optimizer = AdamW(self.master, hyperparameters)
        self.shard_gradient = self.gradients

    def _adopt(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Makes every parameter, and its gradient, a view of the flat buffers."""
        for entry in self.entries:
            parameter = parameters[entry.name]
            span = slice(entry.first, entry.last)
            view = self.values[span].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            gradient = self.gradients[span].view(parameter.shape)
            if self.mixed:
                parameter.register_post_accumulate_grad_hook(_adder(gradient))
            else:
                parameter.grad = gradient

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def reduce(self) -> None:
        """Sums the gradients over the replicas; shares of the batch are already in the sums."""
        self.shard_gradient = self.gradients
        if self.group is None:
            return
        if self.zero_stage == 0:
            dist.all_reduce(self.gradients, group=self.group)
            return
        self.shard_gradient = torch.empty_like(self.gradients[self.shard])
        reduce_scatter(self.shard_gradient, self.gradients, self.group)

    def norms(self, tp_index: int) -> Tensor:
        """The norm of each parameter's reduced gradient, [entries], as far as it is held here.

        Over all ranks of the stage each element counts in exactly one norm.
        """
        none = self.gradients.new_zeros(())
        answers = self.group is None or self.zero_stage == 1 or self.group.rank() == 0
        norms = []
        for entry in self.entries:
            first, last = max(entry.first, self.shard.start), min(entry.last, self.shard.stop)
            if answers and first < last and (entry.sharded or tp_index == 0):
                piece = self.shard_gradient[first - self.shard.start : last - self.shard.start]
                norms.append(torch.linalg.vector_norm(piece))
            else:
                norms.append(none)
        return torch.stack(norms)

    def update(self, learning_rate: float) -> None:
        """Updates this rank's shard with its reduced gradient, then gathers the parameters."""
        self.optimizer.update(self.shard_gradient, learning_rate)
        self.shard_gradient = self.gradients
        own = self.values[self.shard]
        if self.mixed:
            own.copy_(self.master)
        if self.group is not None and self.zero_stage == 1:
            all_gather(self.values, own, self.group)


def _layout(
    parameters: dict[str, torch.nn.Parameter], sharded: dict[str, bool]
) -> tuple[list[Entry], int]:
    entries, offset = [], 0
    for name, parameter in parameters.items():
        entries.append(Entry(name, offset, offset + parameter.numel(), sharded[name]))
        offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return entries, offset


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add
