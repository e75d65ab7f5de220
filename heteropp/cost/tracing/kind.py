"""What a traced stage depends on, beside its model and its number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm

from heteropp.description.hyperparameters import OptimizerName

# of a step, each traced by itself
PIECES = (
    *("forward", "backward_input", "backward_weight", "norm", "update", "orthogonal"),
    *("expert_norm", "expert_update"),  # of experts that lie over ranks, whose copies are fewer
)


@dataclass(frozen=True)
class Spread:
    """How the experts of a layer lie over ranks: the stage's own one, then the others in any order.

    Every expert is taken to be given as many rows as any other.
    """

    shares: tuple[int, ...]  # numbers of experts, by rank
    rows: tuple[int, ...]  # of each rank's own tokens, in any unit

    @classmethod
    def of(cls, shares: Sequence[int], rows: Sequence[int], index: int) -> Spread:
        """Returns that of one of several ranks, equal for those to which the others are alike."""
        unit = gcd(*rows)
        ranks = list(zip(shares, (row // unit for row in rows), strict=True))
        own = ranks.pop(index)
        shares, rows = zip(own, *sorted(ranks), strict=True)
        return cls(shares, rows)

    def with_more_rows(self, times: Fraction) -> Spread:
        """Returns it with so many more rows of others that those which come are as many times as
        many.
        """
        own, total = self.rows[0], sum(self.rows)
        others, needed = total - own, times * total - own
        rows = [row * needed / others for row in self.rows]
        rows[0] = Fraction(own)
        unit = lcm(*(row.denominator for row in rows))
        whole = [int(row * unit) for row in rows]
        return Spread(self.shares, tuple(row // gcd(*whole) for row in whole))


@dataclass(frozen=True)
class StageKind:
    block: str  # the kind of its blocks
    first: bool  # it embeds
    last: bool  # it ends in the loss
    tp: int
    sequences: int  # of a micro-batch
    sequence_parallel: bool = False
    selective_recompute: bool = False
    whole_backward: bool = False  # none of it is put off; it is then all in backward_input
    optimizer: OptimizerName = "adamw"
    token_shares: tuple[int, ...] | None = None  # of a replica with context parallelism
    cp_index: int = 0  # which of them it has
    sliced: bool = False  # whether they are slices, which one rank runs in turn, in their place
    spread: Spread | None = None  # of a stage with expert parallelism

    @property
    def with_slice_alone(self) -> StageKind:
        """The same slice of sequences whose other slices are as few as can be: they change
        nothing.
        """
        assert self.token_shares is not None
        first = sum(self.token_shares[: self.cp_index])
        tokens = self.token_shares[self.cp_index]
        rest = sum(self.token_shares) - first - tokens
        shares = tuple(filter(None, (first, tokens, rest)))
        return replace(self, token_shares=shares, cp_index=int(first > 0))
