"""ZeRO: parameters and gradients in flat buffers, the optimizer's state cut over the replicas.

The replicas of a stage hold the same parameters, and summands of their gradients. Each updates its
shard: part of the buffer, or with ZeRO stage 0, or one replica, the whole of it. Which collectives
sum the gradients and gather the parameters is the resolver's answer. With stage 2 the whole
gradients stand only from a ministage's first backward until they are reduced.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.layout.flat_buffer import BufferPiece, Entry, Experts
from heteropp.layout.hspmd.annotation import DUPLICATE, PARTIAL, Annotation
from heteropp.layout.hspmd.resolution import Kind, resolve
from heteropp.models.stage_module import StageModule
from heteropp.optimizer.flat import FlatBuffers
from heteropp.optimizer.shard_optimizer import ShardOptimizer
from heteropp.process_groups.collective import start


class FlatParameters(FlatBuffers):
    """The flat buffers of a ministage, their sums over the replicas, and their optimizer."""

    def __init__(
        self,
        module: StageModule,
        group: dist.ProcessGroup | None,
        zero_stage: int,
        hyperparameters: Hyperparameters,
        experts: Experts = "all",
    ) -> None:
        """group: the ranks that hold the same slices; None: no other does. experts: which
        parameters these are.
        """
        self.group, self.zero_stage, self.hyperparameters = group, zero_stage, hyperparameters
        self.replica, replicas = (group.rank(), group.size()) if group is not None else (0, 1)
        shards = replicas if zero_stage else 1
        super().__init__(module, shards, gradients=zero_stage < 2, experts=experts)
        self.shard = self.layout.shard(self.replica % shards)
        self.summing, self.gathering = _collectives(replicas, shards, self.layout.size)
        # a model of 16 bits keeps a master copy in float32
        own = self.values[self.shard]
        self.master = own.float() if self.mixed else own
        whole = self._whole if shards > 1 else None
        self.optimizer = ShardOptimizer(
            self.master,
            self.layout,
            self.shard,
            hyperparameters,
            module.group,
            whole,
            module.model.is_expert_bias,
        )
        self.shard_gradient: Tensor | None = None  # once reduced
        self.reducing: dist.Work | None = None

    @property
    def pieces(self) -> list[BufferPiece]:
        """The pieces that this rank's shard holds; their offsets are those of the whole buffer."""
        return self.layout.pieces(self.replica % self.layout.shards)

    def speaks_for(self, entry: Entry) -> bool:
        """Whether this rank, of those with the same elements of a parameter, speaks for it."""
        return (self.layout.shards > 1 or self.replica == 0) and (
            entry.sharded or self.module.group.index == 0
        )

    def reduce(self) -> None:
        """Starts to sum the gradients over the replicas, each of its share of the batch."""
        assert self.gradients is not None
        self._sum_copies(self.gradients)
        self.add_expert_loads()  # which all tensor-parallel ranks have counted alike
        self.shard_gradient = self.gradients
        if self.layout.shards > 1:
            self.shard_gradient = torch.empty_like(self.gradients[self.shard])
        self.reducing = start(self.summing, self.shard_gradient, self.gradients, self.group)

    def _sum_copies(self, gradients: Tensor) -> None:
        """Sums the gradients of uncut parameters over the tensor-parallel group.

        That is due where each rank has a summand: of its own rows where sequence parallelism cuts
        them, or of what it computes with a parameter that acts on what is cut.
        """
        group = self.module.group
        copies = [
            gradients[e.first : e.last]
            for e in self.entries
            if e.parameter.gradient_states(group.size, group.sequence_parallel).summands > 1
        ]
        if not copies:
            return
        total = torch.cat(copies)
        group.all_reduce(total)
        for copy, part in zip(copies, total.split([len(copy) for copy in copies]), strict=True):
            copy.copy_(part)

    def is_reduced(self) -> bool:
        """Whether `reduced` would not wait."""
        return self.reducing is None or self.reducing.is_completed()

    def reduced(self) -> Tensor:
        """Waits until the sums are there; returns those of this rank's shard."""
        assert self.shard_gradient is not None
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
            if self.zero_stage == 2:
                self._let_gradients_go()
        return self.shard_gradient

    def norms(self) -> dict[str, Tensor]:
        """Returns the norms of the reduced gradients that this rank's shard holds, by global name.

        Over all ranks of the stage each element counts in exactly one norm.
        """
        gradient, start = self.reduced(), self.shard.start
        norms = {}
        for entry in self.entries:
            first, last = max(entry.first, start), min(entry.last, self.shard.stop)
            is_bias = self.module.model.is_expert_bias(entry.parameter)
            if first < last and self.speaks_for(entry) and not is_bias:
                norms[entry.global_name] = torch.linalg.vector_norm(
                    gradient[first - start : last - start]
                )
        return norms

    def take_values(self) -> None:
        """Copies parameters that were set from outside into the master copy, if there is one."""
        if self.mixed:
            self.master.copy_(self.values[self.shard])

    def update(self, learning_rate: float) -> None:
        """Updates this rank's shard with its reduced gradient."""
        self._balance_experts()
        self.optimizer.update(self.reduced(), learning_rate)
        if self.mixed:
            self.values[self.shard].copy_(self.master)

    @torch.no_grad()
    def _balance_experts(self) -> None:
        """Moves routers' biases towards the experts below the mean load, and away from those above
        (DeepSeek-V3, section 2.1.2). Their gradient says no more than that, and is then 0.
        """
        rate, start = self.hyperparameters.expert_bias_update_rate, self.shard.start
        for entry in self.entries if rate else ():
            first, last = max(entry.first, start), min(entry.last, self.shard.stop)
            if first < last and self.module.model.is_expert_bias(entry.parameter):
                own = slice(first - start, last - start)
                above = self.reduced()[own]
                self.master[own] -= rate * above.sign()
                above.zero_()

    def gather(self) -> dist.Work | None:
        """Starts to gather the parameters that train over the replicas."""
        training = self.values[: self.layout.size]
        return start(self.gathering, training, self.values[self.shard], self.group)

    def _whole(self, part: Tensor) -> Tensor:
        """Returns a whole buffer of which each replica has what its shard holds."""
        whole = part.new_empty(self.layout.size)
        if work := start(self.gathering, whole, part, self.group):
            work.wait()
        return whole

    def end(self) -> None:
        """Lets go of the reduced gradients, after the update or in its place."""
        self.shard_gradient = None
        if self.zero_stage == 2:
            self._let_gradients_go()


def _collectives(replicas: int, shards: int, size: int) -> tuple[Kind, Kind]:
    """Returns the collectives that sum gradients to where they are kept and gather parameters."""

    def laid_out(dimension: int) -> Annotation:
        return Annotation.of([(range(replicas), {dimension: replicas})])

    kept = laid_out(0 if shards > 1 else DUPLICATE)
    return _kind(laid_out(PARTIAL), kept, size), _kind(kept, laid_out(DUPLICATE), size)


def _kind(source: Annotation, target: Annotation, size: int) -> Kind:
    ((kind,),) = resolve(source, target, (size,), 1).kinds
    return kind
