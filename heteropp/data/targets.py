"""Which tokens of a file are learnt: all that follow from another, or the answers alone."""

from __future__ import annotations

import numpy as np

from heteropp.data.token_file import TokenFile

NOT_COUNTED = -100  # a target that is not learnt; torch's cross entropy leaves it out by default


class Targets:
    """The tokens of a file as targets, each of which follows from the tokens before it.

    A document's first token follows from none, and so is never learnt.
    """

    def __init__(self, tokens: TokenFile) -> None:
        self.tokens, self.ends = tokens.tokens, tokens.ends
        # where ranges of learnt tokens begin and end, in turn; None: all but documents' first
        self.edges = None if tokens.answers is None else tokens.answers.reshape(-1)
        if self.edges is not None:
            lengths = self.edges[1::2] - self.edges[::2]
            self.before = np.concatenate(([0], np.cumsum(lengths)))  # learnt before each range

    def read(self, first: int, last: int) -> np.ndarray:
        """Tokens [first, last), int64, of which those that are not learnt are NOT_COUNTED."""
        found = self.tokens[first:last].astype(np.int64)
        if self.edges is None:
            begun, end = self.ends.searchsorted((first, last))
            found[self.ends[begun:end] - first] = NOT_COUNTED
        else:
            places = self.edges.searchsorted(np.arange(first, last), "right")
            found[places % 2 == 0] = NOT_COUNTED
        return found

    def count(self, first: np.ndarray, last: np.ndarray) -> int:
        """How many tokens of all ranges [first, last) are learnt; no token is read."""
        return int((self._learnt_before(last) - self._learnt_before(first)).sum())

    def _learnt_before(self, places: np.ndarray) -> np.ndarray:
        if self.edges is None:
            return places - self.ends.searchsorted(places)
        passed = self.edges.searchsorted(places, "right")
        inside = passed % 2 == 1
        begins = self.edges[np.maximum(passed, 1) - 1]
        return self.before[passed // 2] + np.where(inside, places - begins, 0)
