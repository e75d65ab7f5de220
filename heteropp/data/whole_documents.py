"""Documents of a token file, each a sequence of its own length, in a run's order.

The n-th document of a run is a function of (seed, n) and the tokens alone, as with packed sequences
(sequences.py). What it has beyond the longest sequence is cut off. Behind a document that is
shorter than its sequence nothing is learnt, and attention, which is causal, never looks there.
"""

from __future__ import annotations

import numpy as np

from heteropp.data.permutation import shuffled
from heteropp.data.sequences import NOT_COUNTED, Numbers, check_vocabulary
from heteropp.data.token_file import TokenFile
from heteropp.files import FileError
from heteropp.model import Model


class WholeDocuments:
    def __init__(self, tokens: TokenFile, model: Model, seed: int | None = None) -> None:
        """`model` has the longest sequence. Without a seed there is one epoch, in the file's order.

        Raises FileError when the model cannot learn these tokens: no document has one that follows
        from another, or there are more kinds than it knows.
        """
        check_vocabulary(tokens, model)
        self.tokens, self.longest, self.seed = tokens, model.sequence_length, seed
        self.count = len(tokens.ends)
        if not (np.diff(tokens.ends, prepend=0) > 1).any():
            raise FileError(
                f"{tokens.path} has no document of two tokens; there is nothing to learn"
            )

    def read(self, numbers: Numbers, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the run's n-th documents, [len(numbers), length] int64 each.

        Targets behind a document's end are NOT_COUNTED; number -1 is no document. What does not
        fit in the length is left out.
        """
        inputs = np.zeros((len(numbers), length), np.int64)
        targets = np.full_like(inputs, NOT_COUNTED)
        for row, (start, size) in enumerate(zip(*self._spans(numbers), strict=True)):
            size = min(size, length)
            inputs[row, :size] = self.tokens.tokens[start : start + size]
            targets[row, :size] = self.tokens.tokens[start + 1 : start + size + 1]
        return inputs, targets

    def lengths(self, numbers: Numbers) -> np.ndarray:
        """How many targets each of these documents has, at most the longest sequence's; int64."""
        return self._spans(numbers)[1]

    def _spans(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin, in tokens, and their lengths, which are 0 where there is none."""
        numbers = np.asarray(numbers, np.int64)
        places = np.where(numbers < 0, -1, shuffled(np.maximum(numbers, 0), self.count, self.seed))
        starts = np.where(places > 0, self.tokens.ends[np.maximum(places, 1) - 1], 0)
        sizes = np.minimum(self.tokens.ends[np.maximum(places, 0)] - starts - 1, self.longest)
        return starts, np.where(places < 0, 0, np.maximum(sizes, 0))
