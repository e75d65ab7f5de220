"""A step's documents, in the sequences of their plans, as tensors on a rank's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from heteropp.data.batch import Batch
from heteropp.data.whole_documents import WholeDocuments, pack
from heteropp.description.plan import Plan
from heteropp.runtime.mixed_lengths.plans import passes, shortest_that_holds, with_micro_batches
from heteropp.runtime.ranks.transport import Coordinates
from heteropp.runtime.step.batches import BatchShare


@dataclass(frozen=True)
class MixedBatch:
    """A rank's part of a step's documents."""

    counted: int  # targets of the whole step, by which the loss is divided
    passes: tuple[tuple[tuple[int, Batch], ...], ...]  # by plan: micro-batches, and their part


class MixedBatches:
    def __init__(
        self,
        documents: WholeDocuments,
        global_batch: int,
        plans: Sequence[Plan],
        rank: int,
        device: torch.device,
    ) -> None:
        """global_batch: documents of a step."""
        self.sequences, self.global_batch = documents, global_batch
        self.plans, self.rank, self.device = plans, rank, device
        self.shares: dict[tuple[int, int], BatchShare] = {}  # by plan and micro-batches

    def at(self, first_document: int) -> MixedBatch:
        """This rank's part of the step that begins with a document of the run."""
        numbers = first_document + np.arange(self.global_batch)
        lengths = self.sequences.lengths(numbers)
        counted = self.sequences.counted(numbers)
        chosen = np.where(lengths > 0, shortest_that_holds(self.plans, lengths), -1)
        return MixedBatch(
            counted,
            tuple(
                tuple(self._passes(i, numbers[chosen == i], lengths[chosen == i], counted))
                for i in range(len(self.plans))
            ),
        )

    def _passes(
        self, i: int, numbers: np.ndarray, lengths: np.ndarray, counted: int
    ) -> Iterator[tuple[int, Batch]]:
        plan = self.plans[i]
        length = plan.model.sequence_length
        rows = list(pack(numbers, lengths, length))
        for micro_batches in passes(plan, len(rows)):
            share = self._share(i, micro_batches)
            own, rows = rows[: share.global_batch], rows[share.global_batch :]
            own += [[]] * (share.global_batch - len(own))
            read = self.sequences.read([own[place] for place in share.own], length)
            yield micro_batches, share.batch(read, counted, [0] * share.micro_batches)

    def _share(self, i: int, micro_batches: int) -> BatchShare:
        """Returns this rank's share of plan `i` with so many micro-batches."""
        if (i, micro_batches) not in self.shares:
            plan = with_micro_batches(self.plans[i], micro_batches)
            self.shares[i, micro_batches] = BatchShare(
                plan, Coordinates.of(plan, self.rank), self.device
            )
        return self.shares[i, micro_batches]
