"""What heteropp-train --bucket reads and says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heteropp.data.token_file import TokenFile
from heteropp.description.plan import Plan, read_plan
from heteropp.runtime.mixed_lengths.plans import by_length, shortest_that_holds

MOST_CUT = 0.5  # of all tokens, beyond which a run is warned of


def read_buckets(paths: Sequence[Path]) -> tuple[Plan, ...]:
    """The plans by their sequences' length. Raises FileError, or PlanError if they are unlike."""
    return by_length([read_plan(path) for path in paths])


def say_documents(tokens: TokenFile, plans: Sequence[Plan]) -> str:
    """How many documents, and of how many tokens, each plan gets, and what is cut off."""
    lengths = np.diff(tokens.ends, prepend=0) - 1  # the last token of each is a target only
    longest = plans[-1].model.sequence_length
    chosen = shortest_that_holds(plans, np.clip(lengths, 0, longest))
    counts = np.bincount(chosen, minlength=len(plans)) / len(lengths)
    learnt = np.bincount(chosen, np.clip(lengths, 0, longest), len(plans))
    shares = ", ".join(
        f"{count:.1%} up to {plan.model.sequence_length} tokens ({sum_:.1%} of all tokens)"
        for count, sum_, plan in zip(counts, learnt / learnt.sum(), plans, strict=True)
    )
    said = f"of {len(lengths):,} documents {shares}"
    if cut := int((lengths > longest).sum()):
        lost = (lengths[lengths > longest] - longest).sum() / lengths.sum()
        said += f"; {cut:,} are longer and cut, by {lost:.1%} of all tokens"
        if lost > MOST_CUT:
            said = (
                f"warning: most tokens are cut away: {said}; give a --bucket of longer sequences, "
                "or split the documents by heteropp-data --longest"
            )
    return said
