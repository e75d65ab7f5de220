"""A stage of any model as one rank holds it: what runs its forwards, and its initial values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heteropp.layout.boxes import Box
from heteropp.models.auxiliary_loss import AuxiliaryLoss, Routing
from heteropp.models.documents import Documents
from heteropp.models.parallel.tensor_parallel import TensorParallelGroup
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.spec import ModelSpec, Parameter


class StageModule(nn.Module):
    """Blocks [first, last) of a model, as one rank of a tensor-parallel group holds them.

    Activations are [rows, hidden], rows = sequences x sequence length, or this rank's part of them
    with sequence parallelism. Parameters are uninitialised until `initialise`.
    """

    has_windows = False  # whether some attention sees a part of the tokens before alone
    experts: tuple[int, int] | None = None  # those [first, last) that it has; None: all
    auxiliary_loss: AuxiliaryLoss | None = None  # of the whole model; None: it has none
    routing: Routing | None = None  # of the micro-batch that a forward is of; set before it

    def __init__(
        self, model: ModelSpec, layers: tuple[int, int], group: TensorParallelGroup
    ) -> None:
        super().__init__()
        self.model, self.group, self.layer_range = model, group, layers
        self.is_first, self.is_last = layers[0] == 0, layers[1] == model.layers
        # rows that routers sent to each expert, by the name of their bias; only what is counted
        self.expert_loads: dict[str, Tensor] = {}

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Documents | None = None,
        part: TokenSlice | None = None,
    ) -> Tensor:
        """Tokens [rows] or activations [rows, hidden] to activations, or to the loss.

        The loss is summed over the rows, a scalar; it needs targets [rows], of which those below 0
        take no part. Dropout asks for the first row's number in the whole run, and is for training
        alone. Rows attend to those of their own document, or of their whole sequence without
        `documents`. part: the slice of sequences that the rows are; None: they are whole. Only of a
        model without `token_slices_problem` is one run.
        """

    def new_routing(self, sequences: int) -> Routing:
        """Returns what a micro-batch begins with, in a model with an auxiliary loss."""
        raise NotImplementedError

    def count_expert_loads(self) -> None:
        """Has routers with a bias count, from now on, the rows that they send to each expert.

        What is counted is what trains: of a forward that is run twice, the one that has gradients.
        """

    def initialise(self, seed: int, *, added_alone: bool = False) -> None:
        """Fills the parameters with this rank's slices of the initial values.

        added_alone: only those that are not the base model's.
        """
        held = dict(self.named_parameters())
        parameters = {p.name: p for p in self.model.parameters(self.layer_range)}
        values = self.model.added_values if added_alone else self.model.initial_values
        for name, whole in values(self.layer_range, seed):
            fill(held[name], self.boxes(parameters[name]), whole)

    def rows_of(self, parameter: Parameter) -> tuple[int, int] | None:
        """Returns which of a parameter's rows, its first dimension, it has; None: all."""
        return self.experts if self.model.is_of_experts(parameter) else None

    def boxes(self, parameter: Parameter) -> tuple[Box, ...]:
        """Returns what it holds of a parameter, one box after another."""
        return parameter.boxes(self.group.size, self.group.index, self.rows_of(parameter))


def fill(target: Tensor, boxes: Sequence[Box], whole: Tensor) -> None:
    """Copies a rank's slices of a whole parameter into what the rank holds of it."""
    put(target, [whole[box.within(Box.whole(whole.shape))] for box in boxes])


@torch.no_grad()
def put(target: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copies the values of a parameter's boxes, in order, into what a rank holds of it."""
    flat = [piece.reshape(-1) for piece in pieces]
    value = flat[0] if len(flat) == 1 else torch.cat(flat)
    target.copy_(value.view(target.shape).to(target.dtype))
