"""What heteropp-train --bucket reads and says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heteropp.data.token_file import TokenFile
from heteropp.mixed_lengths.plans import by_length, documents_a_step, shortest_that_holds
from heteropp.plan import Plan, read_plan


def read_buckets(paths: Sequence[Path]) -> tuple[Plan, ...]:
    """The plans by their sequences' length. Raises FileError, or PlanError if they are unlike."""
    return by_length([read_plan(path) for path in paths])


def say_documents(tokens: TokenFile, plans: Sequence[Plan]) -> str:
    """How many documents each plan gets, and what is cut off."""
    lengths = np.diff(tokens.ends, prepend=0) - 1  # the last token of each is a target only
    longest = plans[-1].model.sequence_length
    counts = np.bincount(
        shortest_that_holds(plans, np.clip(lengths, 0, longest)), minlength=len(plans)
    )
    shares = ", ".join(
        f"{count / len(lengths):.1%} up to {plan.model.sequence_length} tokens"
        for count, plan in zip(counts, plans, strict=True)
    )
    said = f"{documents_a_step(plans)} documents a step; of {len(lengths):,}, {shares}"
    if cut := int((lengths > longest).sum()):
        lost = (lengths[lengths > longest] - longest).sum() / lengths.sum()
        said += f"; {cut:,} are longer and cut, {lost:.1%} of all tokens"
    return said
