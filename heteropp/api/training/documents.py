"""Where attention stays when a sequence has several documents: in one, or in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import numpy as np

from heteropp.api.errors import InputError
from heteropp.data.sequences import AttentionWithin, attention_within
from heteropp.data.source import open_tokens
from heteropp.data.token_file import TokenFile
from heteropp.description.plan import Plan


def chosen_attention(
    asked: str | None, data: Path | None, plan: Plan, by_length: Sequence[Plan]
) -> AttentionWithin:
    """Returns what is asked for, or suits the data. Raises InputError or FileError."""
    if asked not in (None, *get_args(AttentionWithin)):
        raise InputError(f"--attention-within is {asked}; expected document or sequence")
    if asked and by_length:
        raise InputError("--attention-within is not for --bucket: there it is within a document")
    within = attention_within(cast(AttentionWithin | None, asked), open_tokens(data))
    if by_length or within == "sequence":
        return within
    if problem := plan.model.documents_problem():
        what = "--attention-within document" if asked else f"{data}, of conversations,"
        raise InputError(
            f"{what} needs a model whose attention can stay within a document: {problem}; "
            "--attention-within sequence lets it see the documents before it"
        )
    return within


def say_cut(tokens: TokenFile, plan: Plan) -> str | None:
    """How many documents are too long to stand whole in a sequence; None: none is."""
    length = plan.model.sequence_length
    cut = int((np.diff(tokens.ends, prepend=0) > length + 1).sum())
    if not cut:
        return None
    return (
        f"{cut:,} of {len(tokens.ends):,} documents are longer than a sequence of {length} tokens, "
        "and cut"
    )
