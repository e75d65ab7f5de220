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
        self.tokens = plan.tokens(place.rank) or (0, self.length)  # of each sequence
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
        counted: the global batch's tokens that count in the loss.
        """
        inputs, targets, *documents = read
        first, last = self.tokens
        return Batch(
            self._to_device(inputs[:, first:last]) if self.reads else None,
            self._to_device(targets[:, first:last]) if self.learns else None,
            counted,
            first_rows,
            *(
                Documents.of_step(self._by_micro_batch(each[:, :last]), last, self.device, first)
                for each in documents
            ),
        )

    def _to_device(self, rows: np.ndarray) -> Tensor:
        return self._by_micro_batch(rows).to(self.device)

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
        first_rows = (own[:: self.share.share] * self.share.length).tolist()
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
