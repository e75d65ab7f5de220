"""ZeRO: parameters and gradients in flat buffers, the optimizer's state cut over the replicas.

The replicas of a stage hold the same parameters. Gradients are reduce-scattered, each replica
updates its shard, and the parameters are all-gathered. With ZeRO stage 0, or one replica, the
shard is the whole buffer. With stage 2 the whole gradients stand only from a ministage's first
backward until they are reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.hyperparameters import Hyperparameters
from heteropp.layout import Entry, Piece, layout
from heteropp.training.ranks.collective import start_all_gather, start_reduce_scatter
from heteropp.training.stage.llama import StageModule
from heteropp.training.step.optimizer import AdamW


class FlatParameters:
    """The parameters of a ministage as one rank holds them, moved into flat buffers."""

    def __init__(
        self,
        module: StageModule,
        group: dist.ProcessGroup | None,
        zero_stage: int,
        hyperparameters: Hyperparameters,
    ) -> None:
        self.module, self.group, self.zero_stage = module, group, zero_stage
        self.replica = group.rank() if group is not None else 0
        shards = group.size() if group is not None and zero_stage else 1
        tp = module.group
        self.layout = layout(module.model, module.layer_range, tp.size, tp.index, shards)
        self.shard = self.layout.shard(self.replica % shards)
        self.parameters = dict(module.named_parameters())
        example = next(iter(self.parameters.values()))
        # a model of 16 bits sums its gradients and keeps a master copy in float32
        self.mixed = example.dtype.itemsize == 2
        self.wide = torch.float32 if self.mixed else example.dtype
        self.values = torch.zeros(self.layout.size, dtype=example.dtype, device=example.device)
        self._adopt()
        own = self.values[self.shard]
        self.master = own.float() if self.mixed else own
        self.optimizer = AdamW(self.master, hyperparameters)
        self.gradients: Tensor | None = None if zero_stage == 2 else self._empty_gradients()
        self.shard_gradient: Tensor | None = None  # once reduced
        self.reducing: dist.Work | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.layout.entries

    @property
    def pieces(self) -> list[Piece]:
        """What the shard holds; places are of the whole buffer."""
        return self.layout.pieces(self.replica % self.layout.shards)

    def answers(self, entry: Entry) -> bool:
        """Whether this rank, of those with the same elements of a parameter, speaks for it."""
        return (self.layout.shards > 1 or self.replica == 0) and (
            entry.sharded or self.module.group.index == 0
        )

    def begin(self) -> None:
        """Before the first backward of a step: gradients are zero."""
        if self.gradients is None:
            self.gradients = self._empty_gradients()
        else:
            self.gradients.zero_()

    def reduce(self) -> None:
        """Starts to sum the gradients over the replicas, each of its share of the batch."""
        assert self.gradients is not None
        self._sum_copies(self.gradients)
        self.shard_gradient = self.gradients
        if self.group is None:
            return
        if self.layout.shards == 1:
            self.reducing = dist.all_reduce(self.gradients, group=self.group, async_op=True)
            return
        self.shard_gradient = torch.empty_like(self.gradients[self.shard])
        self.reducing = start_reduce_scatter(self.shard_gradient, self.gradients, self.group)

    def _sum_copies(self, gradients: Tensor) -> None:
        """Of parameters that tensor parallelism does not cut, where it cuts the rows instead."""
        if not self.module.group.sequence_parallel:
            return
        copies = [gradients[e.first : e.last] for e in self.entries if not e.sharded]
        total = torch.cat(copies)
        self.module.group.all_reduce(total)
        for copy, part in zip(copies, total.split([len(copy) for copy in copies]), strict=True):
            copy.copy_(part)

    def is_reduced(self) -> bool:
        """Whether `reduced` would not wait."""
        return self.reducing is None or self.reducing.is_completed()

    def reduced(self) -> Tensor:
        """Waits until the sums are there; gives those of this rank's shard."""
        assert self.shard_gradient is not None
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
            if self.zero_stage == 2:
                self._let_gradients_go()
        return self.shard_gradient

    def norms(self) -> dict[str, Tensor]:
        """By global name the norm of each parameter's reduced gradient, as far as it is held here.

        Over all ranks of the stage each element counts in exactly one norm.
        """
        gradient, start = self.reduced(), self.shard.start
        norms = {}
        for entry in self.entries:
            first, last = max(entry.first, start), min(entry.last, self.shard.stop)
            if first < last and self.answers(entry):
                norms[entry.global_name] = torch.linalg.vector_norm(
                    gradient[first - start : last - start]
                )
        return norms

    def update(self, learning_rate: float) -> None:
        """Updates this rank's shard with its reduced gradient."""
        self.optimizer.update(self.reduced(), learning_rate)
        if self.mixed:
            self.values[self.shard].copy_(self.master)

    def gather(self) -> dist.Work | None:
        """Starts to gather the parameters over the replicas."""
        if self.layout.shards == 1:
            return None
        assert self.group is not None
        return start_all_gather(self.values, self.values[self.shard], self.group)

    def end(self) -> None:
        """After the update, or in its place: the reduced gradients go."""
        self.shard_gradient = None
        if self.zero_stage == 2:
            self._let_gradients_go()

    def _adopt(self) -> None:
        """Makes every parameter a view of the flat buffer."""
        for entry in self.entries:
            parameter = self.parameters[entry.name]
            view = self.values[entry.first : entry.last].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            if self.mixed:
                parameter.register_post_accumulate_grad_hook(self._adder(entry))

    def _adder(self, entry: Entry) -> Callable[[Tensor], None]:
        owner = weakref.ref(self)  # who holds the parameter, which holds this: nothing would go

        def add(parameter: Tensor) -> None:
            if parameter.grad is None:  # put off, for W to add
                return
            flat = owner()
            assert flat is not None and flat.gradients is not None
            flat.gradients[entry.first : entry.last].view(parameter.shape).add_(parameter.grad)
            parameter.grad = None

        return add

    def _empty_gradients(self) -> Tensor:
        """Where the backward adds to: every parameter's gradient is a view of it."""
        gradients = torch.zeros(self.layout.size, dtype=self.wide, device=self.values.device)
        if not self.mixed:
            for entry in self.entries:
                parameter = self.parameters[entry.name]
                parameter.grad = gradients[entry.first : entry.last].view(parameter.shape)
        return gradients

    def _let_gradients_go(self) -> None:
        self.gradients = None
        for parameter in self.parameters.values():
            parameter.grad = None
