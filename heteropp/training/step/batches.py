"""Which sequences of a step a rank takes, as tensors on its device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from heteropp.data.batch import Batch
from heteropp.data.sequences import Sequences
from heteropp.data.token_file import TokenFile
from heteropp.files import FileError
from heteropp.plan import Plan
from heteropp.training.ranks.control import Control
from heteropp.training.ranks.transport import Place


class Batches:
    """A global batch is cut as the plan says: to pipelines, micro-batches, then replicas."""

    def __init__(
        self, sequences: Sequences, plan: Plan, place: Place, device: torch.device
    ) -> None:
        self.sequences, self.device, self.global_batch = sequences, device, plan.global_batch
        self.reads = any(first == 0 for first, _ in place.layers)
        self.learns = any(last == plan.model.layers for _, last in place.layers)
        shares = [replica.batch_share for replica in place.stage.replicas]
        self.share, self.length = shares[place.replica_index], plan.model.sequence_length
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

    def at(self, first_sequence: int) -> Batch:
        """This rank's part of the global batch that begins with a sequence of the run."""
        everyones = range(first_sequence, first_sequence + self.global_batch)
        counted = max(1, self.sequences.counted(everyones))
        tokens = targets = None
        if self.reads or self.learns:
            inputs, outputs = self.sequences.read(first_sequence + self.own)
            tokens = self._to_device(inputs) if self.reads else None
            targets = self._to_device(outputs) if self.learns else None
        first_rows = (first_sequence + self.own[:: self.share]) * self.length
        return Batch(tokens, targets, counted, first_rows.tolist())

    def _to_device(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.reshape(self.micro_batches, -1)).to(self.device)


def check_same_data(control: Control, what: str, tokens: TokenFile) -> None:
    """Raises FileError when the ranks, on their machines, read unlike tokens."""
    control.publish(f"{what}/sha256", tokens.sha256)
    for rank, theirs in enumerate(control.collect(f"{what}/sha256")):
        if theirs != tokens.sha256:
            raise FileError(
                f"{tokens.path} is not the --{what} that rank {rank} reads; expected the same on "
                "every machine"
            )
