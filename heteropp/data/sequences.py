"""Sequences of a token file, in an order that is the same for every layout and every resumed run.

Documents are packed: the file is cut into sequences of one length, wherever documents end. Each
epoch goes through all of them once, in an order of its own. The n-th sequence of a run is a
function of (seed, n) and the tokens alone, so how many were trained on is the whole position in
the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heteropp.data.permutation import shuffled
from heteropp.data.token_file import TokenFile
from heteropp.description.files import FileError
from heteropp.models.spec import ModelSpec

NOT_COUNTED = -100  # a target that is not learnt; torch's cross entropy leaves it out by default
Numbers = Sequence[int] | np.ndarray


class Sequences:
    def __init__(self, tokens: TokenFile, model: ModelSpec, seed: int | None = None) -> None:
        """Takes the sequences of a token file; without a seed, one epoch in the file's order.

        Raises FileError when the model cannot learn these tokens: too few of them for a sequence,
        or more kinds than it knows.
        """
        self.tokens, self.length, self.seed = tokens, model.sequence_length, seed
        check_vocabulary(tokens, model)
        self.count = (len(tokens.tokens) - 1) // self.length  # the last token is a target only
        if self.count < 1:
            raise FileError(
                f"{tokens.path} has {len(tokens.tokens)} tokens; one sequence needs "
                f"{self.length + 1}"
            )

    def read(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the run's n-th sequences, [len(numbers), length] int64 each.

        A document's first token does not follow from the document before: as a target it is
        NOT_COUNTED. So is everything after the only epoch of an order without a seed.
        """
        inputs = np.zeros((len(numbers), self.length), np.int64)
        targets = np.full_like(inputs, NOT_COUNTED)
        for row, start in enumerate(self._starts(numbers)):
            if start < 0:
                continue
            piece = self.tokens.tokens[start : start + self.length + 1]
            inputs[row], targets[row] = piece[:-1], piece[1:]
            first, last = self._documents_begun(start)
            targets[row, self.tokens.ends[first:last] - start - 1] = NOT_COUNTED
        return inputs, targets

    def counted(self, numbers: Numbers) -> int:
        """How many targets of these sequences are learnt; no token is read."""
        starts = self._starts(numbers)
        starts = starts[starts >= 0]
        first, last = self._documents_begun(starts)
        return len(starts) * self.length - int((last - first).sum())

    def _starts(self, numbers: Numbers) -> np.ndarray:
        """Where the sequences begin, in tokens; -1 for those after the only epoch."""
        places = shuffled(np.asarray(numbers), self.count, self.seed)
        return np.where(places < 0, -1, places * self.length)

    def _documents_begun(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The range of document ends after which a target of the sequence stands."""
        ends = self.tokens.ends
        return ends.searchsorted(starts, "right"), ends.searchsorted(starts + self.length, "right")


def check_vocabulary(tokens: TokenFile, model: ModelSpec) -> None:
    """Raises FileError when there are more kinds of tokens than the model knows."""
    if tokens.vocabulary > model.vocab:
        raise FileError(
            f"{tokens.path} has a vocabulary of {tokens.vocabulary} tokens (tokenizer "
            f"{tokens.tokenizer}); the model's vocab is {model.vocab}"
        )
