"""Slices of a block of the model as a file: safetensors, with a tensor for each quantity of each.

Tensors are named as in the whole model, with their boxes, and nothing in a file depends on the plan
that wrote it. Checkpoints and snapshots have the same files, but for their names: a snapshot's says
the shard as well, as it may be the only one of its block that is left.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from safetensors.torch import save
from torch import Tensor

from heteropp.state.slices.parameter_slice import ParameterSlice, Shard, StoredSlice, block_of
from heteropp.state.slices.quantities import StoredName

Tensors = Mapping[StoredName, Tensor]  # of one slice


class HeldSlice(NamedTuple):
    """A slice of a parameter that a rank holds."""

    shard: Shard  # of its block, that the rank holds
    slice: ParameterSlice
    tensors: Tensors
    owned: bool  # by this rank: of all that hold the slice, it is the one that answers for it

    def copy(self) -> HeldSlice:
        """Returns a copy in host memory."""
        copies = {
            what: tensor.detach().to("cpu", copy=True) for what, tensor in self.tensors.items()
        }
        return self._replace(tensors=copies)


@dataclass(frozen=True)
class BlockFile:
    """What a rank writes of a block, on the host."""

    block: str
    shard: Shard
    slices: Mapping[ParameterSlice, Tensors]

    def content(self) -> bytes:
        return save({name: tensor for name, (_, _, tensor) in self._tensors().items()})

    def tensors_in(self, content: bytes) -> Iterator[StoredSlice]:
        """Yields the content's tensors, in their order there."""
        tensors = self._tensors()
        first = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:first]).items():
            what, piece, tensor = tensors[name]
            begin, end = entry["data_offsets"]
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield StoredSlice(what, piece.name, piece.box, dtype, first + begin, first + end)

    def _tensors(self) -> dict[str, tuple[StoredName, ParameterSlice, Tensor]]:
        return {
            key(what, piece): (what, piece, tensor)
            for piece, tensors in self.slices.items()
            for what, tensor in tensors.items()
        }


def block_files(held: Iterable[HeldSlice]) -> list[BlockFile]:
    """Returns the files of slices that are on the host.

    A slice that stands in two of the rank's ministages is in a file once.
    """
    blocks: dict[tuple[str, Shard], dict[ParameterSlice, Tensors]] = defaultdict(dict)
    for one in held:
        blocks[block_of(one.slice.name), one.shard][one.slice] = one.tensors
    return [BlockFile(block, shard, slices) for (block, shard), slices in blocks.items()]


def key(quantity: StoredName, piece: ParameterSlice) -> str:
    """Returns a tensor's name in a file: "average/layers.3.mlp.down.weight[0:32,16:32]"."""
    ranges = ",".join(f"{first}:{last}" for first, last in piece.box.ranges)
    return f"{quantity}/{piece.name}[{ranges}]"
