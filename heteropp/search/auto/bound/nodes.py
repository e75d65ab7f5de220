"""What nodes compute at most in a step, where their NICs limit them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heteropp.description.chips import ChipSpec
from heteropp.models.spec import ModelSpec, Parameter


@dataclass(frozen=True)
class Work:
    """Work that is to be done, in any unit."""

    sequences: int
    sequence: float  # work of one of them through the whole model
    block: float  # of that, at most through one block
    embedding: float  # of that, through the embedding
    head: float  # of that, through the head
    updates: float  # of all parameters


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike.

    What is summed is the gradients of some parameters, with another node that holds them, too.
    """

    chip_name: str
    chips: int  # of each
    count: int
    sequences_per_s: float  # whose boundary tensors a node's NICs pass
    summed_s: float  # to sum those of the whole model
    block_summed_s: float  # or of one block, which has the fewest parameters that train
    embedding_summed_s: float  # or of the embedding; 0 where the head is tied to it
    head_summed_s: float  # or of the head
    tied: bool  # whether the head is the embedding, and who holds one of them alone sums it

    @classmethod
    def of(
        cls, model: ModelSpec, chip_name: str, chip: ChipSpec, chips: int, count: int, parts: int
    ) -> NodeKind:
        """chips: of each node, of which there are `count`. parts: of a sequence, at most.

        A node may have the last part of each sequence alone, a token of which is at most twice as
        much work as the mean one, as it attends to twice as many; only its boundary tensors pass.
        """
        links = chip.links
        nics_bytes_per_s = min(links.nics_per_node, chips) * links.nic_bytes_per_s
        boundary_bytes = model.sequence_length * model.hidden * model.dtype_bytes
        sizes = _gradient_bytes(model)
        whole_s, block_s, embedding_s, head_s = (n / 2 / nics_bytes_per_s for n in sizes)
        tied = model.tied_elements > 0
        return cls(
            chip_name=chip_name,
            chips=chips,
            count=count,
            sequences_per_s=nics_bytes_per_s / boundary_bytes * (2 if parts > 1 else 1),
            summed_s=whole_s,
            block_summed_s=block_s,
            embedding_summed_s=0.0 if tied else embedding_s,
            head_summed_s=head_s,
            tied=tied,
        )

    @property
    def end_summed_s(self) -> float:
        """Seconds to sum what a node holds at least that holds an end of the model."""
        ends_s = (self.embedding_summed_s, self.head_summed_s)
        return self.block_summed_s + (max(ends_s) if self.tied else min(ends_s))

    def part(self, work: Work, step_s: float, crossings: int) -> float:
        """Returns the most work that a node does which does not hold all blocks.

        crossings: of its NICs, each way, by every sequence that it works on.
        """
        crossed = self.sequences_per_s * step_s / crossings
        return crossed * self._done_of_each(work, step_s, crossed) + work.updates

    def _done_of_each(self, work: Work, step_s: float, crossed: float) -> float:
        """Returns the most work on each of so many sequences.

        What no other node holds meets every sequence, for which the NICs may have no time. Of all
        else the node sums the gradients, first of what is most work for its bytes.
        """
        pieces = (
            (work.block, self.block_summed_s),
            (work.embedding, self.embedding_summed_s),
            (work.head, self.head_summed_s),
        )
        if crossed >= work.sequences or not self.block_summed_s:
            return work.sequence
        done = sum(price for price, summed_s in pieces if not summed_s)
        done += step_s * max(price / summed_s for price, summed_s in pieces if summed_s)
        return min(work.sequence, done)


def _gradient_bytes(model: ModelSpec) -> tuple[int, int, int, int]:
    """Returns the bytes of the gradients of the whole model, of its smallest block, of its
    embedding and of its head.
    """
    width = max(4, model.dtype_bytes)

    def size(parameters: Iterable[Parameter]) -> int:
        return sum(width * math.prod(p.shape) for p in parameters if p.trains)

    def end(layer: int) -> int:
        held = model.parameters((layer, layer + 1))
        return size(p for p in held if not p.name.startswith("layers."))

    blocks = dict.fromkeys(range(model.layers), 0)
    for parameter in model.all_parameters:
        if parameter.name.startswith("layers."):
            blocks[int(parameter.name.split(".")[1])] += size([parameter])
    return size(model.all_parameters), min(blocks.values()), end(0), end(model.layers - 1)


def all_done(kinds: Sequence[NodeKind], speeds: Sequence[float], step_s: float) -> float:
    """Returns the work that nodes do in a step of so many seconds, where NICs limit none."""
    chips_speeds = zip(kinds, speeds, strict=True)
    return sum(kind.count * kind.chips * speed * step_s for kind, speed in chips_speeds)


def most_done(
    kinds: Sequence[NodeKind], speeds: Sequence[float], work: Work, step_s: float
) -> float:
    """Returns the most work that nodes do in a step of so many seconds.

    speeds: work a second of one chip, by kind.

    A node that does not hold the whole model receives a boundary tensor of every sequence that it
    works on, and sends one: the activation and its gradient, at one side of its blocks. A node
    that has blocks before its own and after them does so at both sides, and so does one with both
    ends, from between which the sequence comes back. So all but nodes with one end pass half as
    many sequences; and of all that NICs pass half are sequences.

    An end that several nodes hold is summed by each of them. Of the nodes that have no time for
    that, one has the embedding and another the head, unless these are tied and summed, too; and
    none has, where another node holds the whole model.

    Nodes that hold the whole model sum their gradients: of these, one alone has no one to sum them
    with.
    """
    divided = work.updates
    several = parts = most_gain = most_whole = several_whole = 0.0
    ends_gains: list[float] = []
    for kind, speed in zip(kinds, speeds, strict=True):
        whole = kind.chips * speed * step_s
        inner, outer = (min(whole, kind.part(work, step_s, crossings)) for crossings in (2, 1))
        if kind.end_summed_s <= step_s:
            part = outer
        else:
            part = inner
            if not kind.tied:
                ends_gains += [outer - inner] * min(kind.count, 2)
        divided += kind.count * kind.sequences_per_s * step_s / 2 * work.sequence
        parts += kind.count * part
        most_whole, most_gain = max(most_whole, whole), max(most_gain, whole - part)
        sums = kind.summed_s <= step_s
        several += kind.count * (whole if sums else part)
        several_whole += kind.count * whole if sums else 0.0
    alone = min(parts + most_gain, most_whole + divided)
    none = min(parts + sum(sorted(ends_gains)[-2:]), divided)
    return max(min(several, several_whole + divided), alone, none)
