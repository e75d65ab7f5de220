"""What nodes compute at most in a step, where their NICs limit them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heteropp.description.chips import ChipSpec
from heteropp.models.spec import ModelSpec


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike."""

    chip_name: str
    chips: int  # of each
    count: int
    sequences_per_s: float  # whose boundary tensors a node's NICs pass
    summed_s: float  # to sum the gradients of the whole model with another node

    @classmethod
    def of(
        cls, model: ModelSpec, chip_name: str, chip: ChipSpec, chips: int, count: int
    ) -> NodeKind:
        """chips: of each node, of which there are `count`."""
        links = chip.links
        nics_bytes_per_s = min(links.nics_per_node, chips) * links.nic_bytes_per_s
        boundary_bytes = model.sequence_length * model.hidden * model.dtype_bytes
        width = max(4, model.dtype_bytes)
        gradient_bytes = width * sum(math.prod(p.shape) for p in model.all_parameters if p.trains)
        return cls(
            chip_name=chip_name,
            chips=chips,
            count=count,
            sequences_per_s=nics_bytes_per_s / boundary_bytes,
            summed_s=gradient_bytes / 2 / nics_bytes_per_s,
        )


def most_done(
    kinds: Sequence[NodeKind],
    speeds: Sequence[float],
    sequence: float,
    updates: float,
    step_s: float,
) -> float:
    """Returns the most work, in any unit, that nodes do in a step of so many seconds.

    speeds: work a second of one chip, by kind. sequence: work of one sequence through the whole
    model. updates: work of updating all of it.

    A node that does not hold the whole model sends or receives a boundary tensor of every sequence
    that it works on, and its gradient the other way; and so does another node, so that of all that
    NICs pass half are sequences. Nodes that hold the whole model sum their gradients: of these, one
    alone has no one to sum them with.
    """
    divided = updates
    several = parts = most_gain = most_whole = several_whole = 0.0
    for kind, speed in zip(kinds, speeds, strict=True):
        whole = kind.chips * speed * step_s
        passed = kind.sequences_per_s * step_s * sequence
        part = min(whole, passed + updates)
        divided += kind.count * passed / 2
        parts += kind.count * part
        most_whole, most_gain = max(most_whole, whole), max(most_gain, whole - part)
        sums = kind.summed_s <= step_s
        several += kind.count * (whole if sums else part)
        several_whole += kind.count * whole if sums else 0.0
    return max(min(several, several_whole + divided), min(parts + most_gain, most_whole + divided))
