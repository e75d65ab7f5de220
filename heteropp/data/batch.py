"""What a rank needs of one step's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from heteropp.models.documents import Documents


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one replica, [micro-batches, rows] int64, where its stage needs them.

    A target of NOT_COUNTED takes no part in the loss.
    """

    tokens: Tensor | None  # of the first stage
    targets: Tensor | None  # of the last
    counted: int  # targets of the whole global batch, by which the loss is divided if there are any
    first_rows: Sequence[int]  # of each micro-batch, counted over the whole run
    # by micro-batch, on its device; None: attention sees all of a sequence
    documents: Sequence[Documents] | None = None
