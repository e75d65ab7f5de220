"""Updates a rank's shard of a flat buffer, group by group."""

from __future__ import annotations

import torch
from torch import Tensor

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.layout.flat_buffer import Layout
from heteropp.optimizer.adamw import adamw_update
from heteropp.optimizer.spans import spans


class ShardOptimizer:
    """The optimizer's state of a shard, and its update, in place."""

    def __init__(
        self, values: Tensor, layout: Layout, shard: slice, hyperparameters: Hyperparameters
    ) -> None:
        """values: the shard's, in the dtype that it is updated in."""
        self.values, self.hyperparameters = values, hyperparameters
        self.spans = spans(layout, shard, hyperparameters)
        self.average = torch.zeros_like(values)
        self.average_square = torch.zeros_like(values)
        self.steps = torch.tensor(0.0)  # on the host, where the bias correction is computed

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        for span in self.spans:
            part = slice(span.first, span.last)
            adamw_update(
                (self.values[part], gradient[part], self.average[part], self.average_square[part]),
                self.steps,
                learning_rate * span.learning_rate_factor,
                span.weight_decay,
                self.hyperparameters,
            )
        self.steps += 1
