"""Which sequences of a step a rank takes, as tensors on its device."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from heteropp.data.batch import Batch
from heteropp.data.sequences import Sequences
from heteropp.data.token_file import TokenFile
from heteropp.description.files import FileError
from heteropp.description.plan import Plan
from heteropp.models.documents import Documents
from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.transport import Coordinates


class BatchShare:
    """A rank's part of a global batch, which is cut as the plan says: to pipelines, micro-batches,
    then replicas."""

    def __init__(self, plan: Plan, place: Coordinates, device: torch.device) -> None:
        self.device, self.global_batch = device, plan.global_batch
        self.reads = any(first == 0 for first, _ in place.layers)
        self.learns = any(last == plan.model.layers for _, last in place.layers)
        shares = [replica.batch_share for replica in place.stage.replicas]
        self.share, self.length = shares[place.replica_index], plan.model.sequence_length
        # the tokens [first, last) of each sequence that it takes, slice by slice
        self.parts = place.pipeline.slice_ranges or (plan.tokens(place.rank) or (0, self.length),)
        first = sum(shares[: place.replica_index])
        earlier = sum(p.micro_batches for p in plan.pipelines[: place.pipeline_index])
        begin = earlier * plan.micro_batch
        self.micro_batches = place.pipeline.micro_batches * plan.micro_batch // sum(shares)
        self.own = np.array(
            [
                begin + micro_batch * sum(shares) + first + sequence
                for micro_batch in range(self.micro_batches)
                for sequence in range(self.share)
            ]
        )

    def batch(
        self,
        read: Sequence[np.ndarray],
        counted: int,
        first_rows: Sequence[int],
    ) -> Batch:
        """Returns this rank's part of a global batch.

        read: the inputs, targets and perhaps documents of its sequences, [own, length] each;
        counted: the global batch's tokens that count in the loss; first_rows: see Batch.
        """
        inputs, targets, *documents = read
        return Batch(
            self._to_device(inputs) if self.reads else None,
            self._to_device(targets) if self.learns else None,
            counted,
            first_rows,
            *map(self._documents, documents),
        )

    def _to_device(self, rows: np.ndarray) -> list[Tensor]:
        """Returns [own, length] by micro-batch, slice by slice."""
        by_part = [self._by_micro_batch(rows[:, first:last]) for first, last in self.parts]
        whole = torch.cat(by_part, 1).to(self.device)
        sizes = [part.shape[1] for part in by_part]
        return [part for row in whole for part in row.split(sizes)]

    def _documents(self, numbers: np.ndarray) -> list[Documents]:
        """Returns those of the tokens up to each slice's last."""
        by_part = [
            Documents.of_step(self._by_micro_batch(numbers[:, :last]), last, self.device, first)
            for first, last in self.parts
        ]
        return [part for of_micro_batch in zip(*by_part, strict=True) for part in of_micro_batch]

    def _by_micro_batch(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.reshape(self.micro_batches, -1))


class Batches:
    """A rank's parts of global batches of packed sequences."""

    def __init__(
        self, sequences: Sequences, plan: Plan, place: Coordinates, device: torch.device
    ) -> None:
        self.sequences, self.global_batch = sequences, plan.global_batch
        self.share = BatchShare(plan, place, device)

    def at(self, first_sequence: int) -> Batch:
        """Returns this rank's part of the global batch that begins with a sequence of the run."""
        everyones = first_sequence + np.arange(self.global_batch)
        counted = self.sequences.counted(everyones)
        own = everyones[self.share.own]
        by_micro_batch = own[:: self.share.share] * self.share.length
        first_rows = by_micro_batch.repeat(len(self.share.parts)).tolist()
        needs = self.share.reads or self.share.learns or self.sequences.within == "document"
        if not needs:
            return Batch(None, None, counted, first_rows)
        return self.share.batch(self.sequences.read(own), counted, first_rows)


def check_same_data(control: Control, what: str, tokens: TokenFile) -> None:
    """Raises FileError when the ranks, on their machines, read unlike tokens."""

    def first_ranks(texts: Sequence[str]) -> str:
        """Returns the first rank that reads it, for each that some rank reads."""
        return json.dumps({sha256: texts.index(sha256) for sha256 in texts})

    control.publish(f"{what}/sha256", tokens.sha256)
    for theirs, rank in json.loads(control.answered(f"{what}/sha256", first_ranks)).items():
        if theirs != tokens.sha256:
            raise FileError(
                f"{tokens.path} is not the --{what} that rank {rank} reads; expected the same on "
                "every machine"
            )
