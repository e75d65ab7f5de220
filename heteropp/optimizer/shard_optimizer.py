"""Updates a rank's shard of a flat buffer, group by group: AdamW, or Muon and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.layout.flat_buffer import Layout
from heteropp.layout.parameter import Parameter
from heteropp.models.parallel.tensor_parallel import TensorParallelGroup
from heteropp.optimizer.adamw import adamw_update
from heteropp.optimizer.muon import Gather, Muon
from heteropp.optimizer.runs import runs


class ShardOptimizer:
    """The optimizer's state of a shard, and its update, in place.

    With Muon hidden matrices have the average of their gradients, and none of the squares.
    """

    def __init__(
        self,
        values: Tensor,
        layout: Layout,
        shard: slice,
        hyperparameters: Hyperparameters,
        group: TensorParallelGroup,
        gather: Gather | None,
        moved_by_loads: Callable[[Parameter], bool],
    ) -> None:
        """values: the shard's, in the dtype that it is updated in; gather: see Muon.
        moved_by_loads: whether experts' loads alone move a parameter, which then does not decay.
        """
        self.values, self.hyperparameters = values, hyperparameters
        self.average = torch.zeros_like(values)
        self.muon: Muon | None = None
        self.skipped = 0  # elements that AdamW does not update
        if hyperparameters.optimizer == "muon":
            self.skipped = layout.matrices_in(shard)
            self.muon = Muon(values, self.average, layout, shard, hyperparameters, group, gather)
        rest = slice(shard.start + self.skipped, shard.stop)
        settings = {
            entry.name: (1.0, 0.0)
            if moved_by_loads(entry.parameter)
            else hyperparameters.of(entry.parameter, entry.global_name)
            for entry in layout.entries
        }
        # of the learning rate: what it is multiplied by, and how much of the values goes with it
        self.rates = runs(layout, rest, lambda entry: settings[entry.name][0])
        self.decays = runs(layout, rest, lambda entry: math.prod(settings[entry.name]))
        self.average_square = torch.zeros_like(values[self.skipped :])
        self.steps = torch.tensor(0.0)  # on the host, where the bias correction is computed

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        """Updates the shard; the gradient is used up."""
        self.elementwise(gradient, learning_rate)
        if self.muon is not None:
            self.muon.update(gradient, learning_rate)

    def elementwise(self, gradient: Tensor, learning_rate: float) -> None:
        """All of the update that looks at each element alone."""
        if self.muon is not None:
            self.muon.accumulate(gradient[: self.skipped])
        rest = tuple(tensor[self.skipped :] for tensor in (self.values, gradient, self.average))
        for first, last, decay in self.decays:
            if decay:
                rest[0][first:last].mul_(1 - learning_rate * decay)
        for first, last, factor in self.rates:
            values, gradients, averages, squares = (
                tensor[first:last] for tensor in (*rest, self.average_square)
            )
            adamw_update(
                (values, gradients, averages, squares),
                self.steps,
                learning_rate * factor,
                self.hyperparameters,
            )
        self.steps += 1
