"""Sequences of a token file, in an order that is the same for every layout and every resumed run.

Documents are packed. Where attention is within a sequence, the file is cut into sequences of one
length, wherever documents end. Where it is within a document, a sequence holds as many whole ones
as it has room for, as they follow in the file, and only a longer one is cut.

Each epoch goes through all sequences once, in an order of its own. The n-th sequence of a run is a
function of (seed, n) and the tokens alone, so how many were trained on is the whole position in
the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from heteropp.data.permutation import shuffled
from heteropp.data.targets import NOT_COUNTED, Targets
from heteropp.data.token_file import TokenFile
from heteropp.description.files import FileError
from heteropp.models.spec import ModelSpec

AttentionWithin = Literal["document", "sequence"]
Numbers = Sequence[int] | np.ndarray


def attention_within(asked: AttentionWithin | None, tokens: TokenFile) -> AttentionWithin:
    """Returns what is asked for, or what suits the data: answers are to their own conversation."""
    return asked or ("sequence" if tokens.answers is None else "document")


class Sequences:
    def __init__(
        self,
        tokens: TokenFile,
        model: ModelSpec,
        seed: int | None = None,
        within: AttentionWithin = "sequence",
    ) -> None:
        """Takes the sequences of a token file; without a seed, one epoch in the file's order.

        within: where attention is to stay. Raises FileError when the model cannot learn these
        tokens: too few of them for a sequence, none that is learnt, or more kinds than it knows.
        """
        self.tokens, self.length, self.seed = tokens, model.sequence_length, seed
        self.within = within
        self.targets = Targets(tokens)
        check_vocabulary(tokens, model)
        last = len(tokens.tokens) - 1  # it is a target only
        # where sequences of whole documents begin, and the last one ends
        self.begins = _begins(tokens.ends, self.length) if within == "document" else None
        self.count = last // self.length if self.begins is None else len(self.begins) - 1
        if self.count < 1:
            raise FileError(
                f"{tokens.path} has {len(tokens.tokens)} tokens; one sequence needs "
                f"{self.length + 1}"
            )
        if self.begins is None:
            last = self.count * self.length
        if not self.targets.count(np.array(1), np.array(last + 1)):
            raise FileError(f"{tokens.path} has no token to learn in its sequences")

    def read(self, numbers: Numbers) -> tuple[np.ndarray, ...]:
        """Inputs and targets of the run's n-th sequences, [len(numbers), length] int64 each.

        Where attention is within a document there are documents as well: numbers from 0, and -1
        where a sequence has room left. A target that is not learnt is NOT_COUNTED, as is everything
        after the only epoch of an order without a seed.
        """
        inputs = np.zeros((len(numbers), self.length), np.int64)
        targets = np.full_like(inputs, NOT_COUNTED)
        documents = np.full_like(inputs, -1)
        for row, (start, stop) in enumerate(zip(*self._spans(numbers), strict=True)):
            own = slice(0, stop - start)
            inputs[row, own] = self.tokens.tokens[start:stop]
            targets[row, own] = self.targets.read(start + 1, stop + 1)
            if self.begins is not None:
                which = self.tokens.ends.searchsorted(np.arange(start, stop), "right")
                documents[row, own] = which - which[:1]
        return (inputs, targets) if self.begins is None else (inputs, targets, documents)

    def counted(self, numbers: Numbers) -> int:
        """How many targets of these sequences are learnt; no token is read."""
        starts, stops = self._spans(numbers)
        return self.targets.count(starts + 1, stops + 1)

    def _spans(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Where the sequences' inputs begin and end, in tokens; nowhere after the only epoch."""
        places = shuffled(np.asarray(numbers), self.count, self.seed)
        is_there, places = places >= 0, np.maximum(places, 0)
        if self.begins is None:
            starts = places * self.length
            stops = starts + self.length
        else:
            starts = self.begins[places]
            stops = np.minimum(self.begins[places + 1], starts + self.length)
            stops = np.minimum(stops, len(self.tokens.tokens) - 1)
        return starts * is_there, stops * is_there


def check_vocabulary(tokens: TokenFile, model: ModelSpec) -> None:
    """Raises FileError when there are more kinds of tokens than the model knows."""
    if tokens.vocabulary > model.vocab:
        raise FileError(
            f"{tokens.path} has a vocabulary of {tokens.vocabulary} tokens (tokenizer "
            f"{tokens.tokenizer}); the model's vocab is {model.vocab}"
        )


def _begins(ends: np.ndarray, length: int) -> np.ndarray:
    """Returns where sequences of whole documents begin, in tokens, and where the last one ends.

    ends: where documents do; length: of a sequence's inputs, behind which there is one more target.
    """
    ends, begins = np.asarray(ends), [0]
    while (begin := begins[-1]) < ends[-1]:
        fitting = int(ends.searchsorted(begin + length + 1, "right"))
        end = int(ends[fitting - 1]) if fitting else 0
        begins.append(end if end > begin else begin + length)
    return np.array(begins)
