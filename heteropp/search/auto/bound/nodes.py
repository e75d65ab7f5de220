"""What nodes compute at most in a step, where their NICs limit them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heteropp.description.chips import ChipSpec
from heteropp.models.spec import ModelSpec


@dataclass(frozen=True)
class Work:
    """Work that is to be done, in any unit."""

    sequences: int
    sequence: float  # work of one of them through the whole model
    block: float  # of that, at most through one block
    ends: float  # of that, through embedding and head
    updates: float  # of all parameters


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike."""

    chip_name: str
    chips: int  # of each
    count: int
    sequences_per_s: float  # whose boundary tensors a node's NICs pass
    summed_s: float  # to sum the gradients of the whole model with another node
    block_summed_s: float  # or of one block, which has the fewest parameters that train

    @classmethod
    def of(
        cls, model: ModelSpec, chip_name: str, chip: ChipSpec, chips: int, count: int
    ) -> NodeKind:
        """chips: of each node, of which there are `count`."""
        links = chip.links
        nics_bytes_per_s = min(links.nics_per_node, chips) * links.nic_bytes_per_s
        boundary_bytes = model.sequence_length * model.hidden * model.dtype_bytes
        whole_bytes, block_bytes = _gradient_bytes(model)
        return cls(
            chip_name=chip_name,
            chips=chips,
            count=count,
            sequences_per_s=nics_bytes_per_s / boundary_bytes,
            summed_s=whole_bytes / 2 / nics_bytes_per_s,
            block_summed_s=block_bytes / 2 / nics_bytes_per_s,
        )

    def done_of_each(self, work: Work, step_s: float) -> float:
        """Returns the most work on a sequence that a node does which does not hold all blocks.

        A block that no other node holds meets every sequence, for which the NICs may have no time.
        Of the other blocks it sums the gradients.
        """
        if self.sequences_per_s * step_s >= work.sequences or not self.block_summed_s:
            return work.sequence
        return min(work.sequence, work.ends + work.block * step_s / self.block_summed_s)


def _gradient_bytes(model: ModelSpec) -> tuple[int, int]:
    """Returns the bytes of the gradients of the whole model, and of its smallest block."""
    width = max(4, model.dtype_bytes)
    blocks = dict.fromkeys(range(model.layers), 0)
    whole = 0
    for parameter in model.all_parameters:
        if parameter.trains:
            size = width * math.prod(parameter.shape)
            whole += size
            if parameter.name.startswith("layers."):
                blocks[int(parameter.name.split(".")[1])] += size
    return whole, min(blocks.values())


def most_done(
    kinds: Sequence[NodeKind], speeds: Sequence[float], work: Work, step_s: float
) -> float:
    """Returns the most work that nodes do in a step of so many seconds.

    speeds: work a second of one chip, by kind.

    A node that does not hold the whole model sends or receives a boundary tensor of every sequence
    that it works on, and its gradient the other way; and so does another node, so that of all that
    NICs pass half are sequences. Nodes that hold the whole model sum their gradients: of these, one
    alone has no one to sum them with.
    """
    divided = work.updates
    several = parts = most_gain = most_whole = several_whole = 0.0
    for kind, speed in zip(kinds, speeds, strict=True):
        whole = kind.chips * speed * step_s
        passed = kind.sequences_per_s * step_s
        part = min(whole, passed * kind.done_of_each(work, step_s) + work.updates)
        divided += kind.count * passed / 2 * work.sequence
        parts += kind.count * part
        most_whole, most_gain = max(most_whole, whole), max(most_gain, whole - part)
        sums = kind.summed_s <= step_s
        several += kind.count * (whole if sums else part)
        several_whole += kind.count * whole if sums else 0.0
    return max(min(several, several_whole + divided), min(parts + most_gain, most_whole + divided))
