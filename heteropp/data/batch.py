"""What a rank needs of one step's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from heteropp.models.documents import Documents


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one replica by micro-batch, where its stage needs them.

    They are [rows] int64, and every slice counts as a micro-batch. A target of NOT_COUNTED takes no
    part in the loss.
    """

    tokens: Sequence[Tensor] | None  # of the first stage
    targets: Sequence[Tensor] | None  # of the last
    counted: int  # targets of the whole global batch, by which the loss is divided if there are any
    # of each micro-batch's first sequence, counted over the whole run
    first_rows: Sequence[int]
    # on their device; None: attention sees all of a sequence
    documents: Sequence[Documents] | None = None
