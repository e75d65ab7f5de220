"""Whole documents of a token file, in a run's order, packed so that none is cut into two sequences.

The n-th document of a run is a function of (seed, n) and the tokens alone, as with the sequences of
sequences.py. What it has beyond the longest sequence is cut off. Several may stand in one sequence;
attention must keep them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heteropp.data.permutation import shuffled
from heteropp.data.sequences import Numbers, check_vocabulary
from heteropp.data.targets import NOT_COUNTED, Targets
from heteropp.data.token_file import TokenFile
from heteropp.description.files import FileError
from heteropp.models.spec import ModelSpec

Rows = Sequence[Sequence[int]]  # by sequence, the documents in it


class WholeDocuments:
    def __init__(self, tokens: TokenFile, model: ModelSpec, seed: int | None = None) -> None:
        """`model` has the longest sequence. Without a seed there is one epoch, in the file's order.

        Raises FileError when the model cannot learn these tokens: none is learnt of those that are
        not cut off, or there are more kinds than it knows.
        """
        check_vocabulary(tokens, model)
        self.tokens, self.longest, self.seed = tokens, model.sequence_length, seed
        self.targets = Targets(tokens)
        self.count = len(tokens.ends)
        starts, sizes = self._cut(np.arange(self.count))
        if not self.targets.count(starts + 1, starts + sizes + 1):
            raise FileError(
                f"{tokens.path} has no token to learn in the first {self.longest + 1} tokens of "
                "any document"
            )

    def read(self, rows: Rows, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and documents of sequences, [len(rows), length] int64 each.

        A row names the run's documents that stand in it, one behind the other. They are numbered
        from 0; behind the last there is number -1, and targets are NOT_COUNTED, as are those that
        are not learnt.
        """
        inputs = np.zeros((len(rows), length), np.int64)
        targets = np.full_like(inputs, NOT_COUNTED)
        documents = np.full_like(inputs, -1)
        for r, row in enumerate(rows):
            first = 0
            for number, (start, size) in enumerate(zip(*self._spans(row), strict=True)):
                own = slice(first, first + size)
                inputs[r, own] = self.tokens.tokens[start : start + size]
                targets[r, own] = self.targets.read(start + 1, start + size + 1)
                documents[r, own] = number
                first += size
        return inputs, targets, documents

    def lengths(self, numbers: Numbers) -> np.ndarray:
        """How many inputs each of these documents has, at most the longest sequence's; int64."""
        return self._spans(numbers)[1]

    def counted(self, numbers: Numbers) -> int:
        """How many targets of these documents are learnt; no token is read."""
        starts, sizes = self._spans(numbers)
        return self.targets.count(starts + 1, starts + sizes + 1)

    def _spans(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin, in tokens, and their lengths, which are 0 after the only epoch."""
        places = shuffled(np.asarray(numbers, np.int64), self.count, self.seed)
        starts, sizes = self._cut(np.maximum(places, 0))
        return starts, np.where(places < 0, 0, sizes)

    def _cut(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents at places of the file begin, in tokens, and their lengths."""
        starts = np.where(places > 0, self.tokens.ends[places - 1], 0)
        return starts, np.clip(self.tokens.ends[places] - starts - 1, 0, self.longest)


def pack(numbers: Numbers, lengths: Sequence[int] | np.ndarray, length: int) -> Rows:
    """Documents into sequences, the longest first, each into the first one that has room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(numbers)), key=lambda i: (-lengths[i], i)):
        found = next((r for r, left in enumerate(room) if left >= lengths[i]), len(rows))
        if found == len(rows):
            rows.append([])
            room.append(length)
        rows[found].append(int(numbers[i]))
        room[found] -= int(lengths[i])
    return rows
