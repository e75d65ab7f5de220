"""A step's documents, in the sequences of their plans, as tensors on a rank's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from heteropp.data.batch import Batch
from heteropp.data.whole_documents import WholeDocuments
from heteropp.mixed_lengths.plans import (
    documents_a_step,
    passes,
    shortest_that_holds,
    with_micro_batches,
)
from heteropp.plan import Plan
from heteropp.training.ranks.transport import Place
from heteropp.training.step.batches import Share

NONE = -1  # in place of a document


@dataclass(frozen=True)
class MixedBatch:
    """A rank's part of a step's documents."""

    counted: int  # targets of the whole step, by which the loss is divided
    passes: tuple[tuple[tuple[int, Batch], ...], ...]  # by plan: micro-batches, and their part


class MixedBatches:
    def __init__(
        self, documents: WholeDocuments, plans: Sequence[Plan], rank: int, device: torch.device
    ) -> None:
        self.sequences, self.plans, self.rank, self.device = documents, plans, rank, device
        self.global_batch = documents_a_step(plans)
        self.cuts: dict[tuple[int, int], tuple[int, Share]] = {}  # by plan and micro-batches

    def at(self, first_document: int) -> MixedBatch:
        """This rank's part of the step that begins with a document of the run."""
        numbers = first_document + np.arange(self.global_batch)
        lengths = self.sequences.lengths(numbers)
        counted = max(1, int(lengths.sum()))
        chosen = np.where(lengths > 0, shortest_that_holds(self.plans, lengths), NONE)
        return MixedBatch(
            counted,
            tuple(
                tuple(self._passes(i, numbers[chosen == i], counted))
                for i in range(len(self.plans))
            ),
        )

    def _passes(self, i: int, numbers: np.ndarray, counted: int) -> list[tuple[int, Batch]]:
        plan, result = self.plans[i], []
        read = partial(self.sequences.read, length=plan.model.sequence_length)
        for micro_batches in passes(plan, len(numbers)):
            size, share = self._cut(i, micro_batches)
            own, numbers = numbers[:size], numbers[size:]
            filled = np.pad(own, (0, size - len(own)), constant_values=NONE)
            result.append((micro_batches, share.of(filled, counted, read)))
        return result

    def _cut(self, i: int, micro_batches: int) -> tuple[int, Share]:
        """Sequences of a plan with so many micro-batches, and this rank's share of them."""
        if (i, micro_batches) not in self.cuts:
            plan = with_micro_batches(self.plans[i], micro_batches)
            share = Share(plan, Place.of(plan, self.rank), self.device)
            self.cuts[i, micro_batches] = plan.global_batch, share
        return self.cuts[i, micro_batches]
