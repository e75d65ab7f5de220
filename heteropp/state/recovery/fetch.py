"""Reads the copies that are this rank's to read, checks them, and passes them on to other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.exchange import TensorPiece, exchange
from heteropp.layout.hspmd.routing import Transfer
from heteropp.state.checkpoint.manifest import CheckpointError
from heteropp.state.recovery.assignment import RecoveryShare
from heteropp.state.recovery.bundles import Bundle, Want
from heteropp.state.recovery.manifest import SnapshotStep, SnapshotTensor, TierKind
from heteropp.state.recovery.sources import Key, StoredTensor
from heteropp.state.recovery.tiers import Tier, Tiers
from heteropp.state.slices.hashes import checksum
from heteropp.state.slices.quantities import StoredName


class Damaged(Exception):
    """A copy is not there, or not as it was written; the message is the end of a sentence."""


class Readings:
    """What this rank has read so far; a copy is read once, however often the ranks think again."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers: dict[TierKind, Tier] = {tier.kind: tier for tier in tiers.each()}
        self.values: dict[StoredTensor, Tensor] = {}

    def read(self, copies: Iterable[StoredTensor]) -> dict[StoredTensor, str]:
        """Reads all tiers in parallel; returns the copies that cannot be used, each with why."""
        waiting: dict[tuple[TierKind, SnapshotStep], list[StoredTensor]] = defaultdict(list)
        for copy in copies:
            if copy not in self.values:
                waiting[copy.tier, copy.step].append(copy)
        damage: dict[StoredTensor, str] = {}
        with ThreadPoolExecutor(max(1, len(waiting)), "recovery") as pool:
            for found in pool.map(lambda item: self._read(*item), waiting.items()):
                for copy, values in found.items():
                    if isinstance(values, Damaged):
                        damage[copy] = str(values)
                    else:
                        self.values[copy] = values
        return damage

    def _read(
        self, place: tuple[TierKind, SnapshotStep], copies: list[StoredTensor]
    ) -> dict[StoredTensor, Tensor | Damaged]:
        kind, step = place
        ranges = [(copy.file, copy.part.begin, copy.part.end) for copy in copies]
        try:
            contents = self.tiers[kind].read(step, ranges)
        except Exception as error:  # of whatever store
            contents = [error] * len(copies)
        pairs = zip(copies, contents, strict=True)
        return {copy: _checked(copy.part, content) for copy, content in pairs}


def _checked(part: SnapshotTensor, content: bytes | Exception) -> Tensor | Damaged:
    if isinstance(content, OSError) and content.strerror:
        return Damaged(f"cannot be read: {content.strerror}")
    if isinstance(content, Exception):
        return Damaged(f"cannot be read: {' '.join(str(content).split())}")
    if len(content) != part.end - part.begin:
        return Damaged(f"is damaged: {len(content)} bytes instead of {part.end - part.begin}")
    if checksum(content) != part.crc32:
        return Damaged("is damaged: its checksum is not the manifest's")
    flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, part.dtype))
    return flat.view(part.box.shape)


class Fetched:
    """A rank's share of the state, in host memory."""

    def __init__(self) -> None:
        self.values: dict[Key, list[tuple[Box, Tensor]]] = defaultdict(list)

    def room(self, bundle: Bundle, box: Box) -> Tensor:
        """Allocates host memory for a box of a bundle's parameter, [quantities, *box.shape].

        The caller fills it, and `read` returns slices of it.
        """
        values = torch.empty((len(bundle.quantities), *box.shape), dtype=bundle.torch_dtype)
        for quantity, part in zip(bundle.quantities, values, strict=True):
            self.values[quantity, bundle.name].append((box, part))
        return values

    def read(self, quantity: StoredName, name: str, box: Box) -> Tensor:
        """Returns a box of a parameter. Raises CheckpointError for one that was not wanted."""
        for whole, values in self.values[quantity, name]:
            if whole.intersect(box) == box:
                return values[box.within(whole)]
        raise CheckpointError(f"{list(box.ranges)} of {name} was not recovered")


def fetch_and_share(
    share: RecoveryShare, rank: int, readings: Readings, wants: Collection[Want]
) -> Fetched:
    """Passes on what was read, block by block, until every rank has what it wants.

    Every rank calls it.
    """
    tensors = {
        (quantity, bundle.name): tensor
        for tensor, bundle in share.bundles.items()
        for quantity in bundle.quantities
    }
    held: dict[int, list[TensorPiece]] = defaultdict(list)  # by tensor
    for copies in share.reads:
        tensor, box = tensors[copies[0].key], copies[0].part.box
        values = torch.stack([readings.values.pop(copy) for copy in copies])
        held[tensor].append(TensorPiece(tensor, share.bundles[tensor].box(box), values))
    fetched, wanted = Fetched(), defaultdict(list)
    for tensor, box in sorted({(tensors[what, piece.name], piece.box) for what, piece in wants}):
        bundle = share.bundles[tensor]
        wanted[tensor].append(TensorPiece(tensor, bundle.box(box), fetched.room(bundle, box)))
    for block in sorted({*share.across, *share.within}):
        across, within = share.across.get(block, ()), share.within.get(block, ())
        concerned = {transfer.tensor for transfer in (*across, *within)}
        own = [piece for tensor in concerned for piece in held.pop(tensor, ())]
        entering = [
            TensorPiece(t.tensor, t.box, torch.empty(t.box.shape, dtype=_dtype(share, t)))
            for t in across
            if t.receiver == rank
        ]
        exchange([across], rank, own, entering)
        room = [piece for tensor in concerned for piece in wanted[tensor]]
        exchange([within], rank, own + entering, room)
    return fetched


def _dtype(share: RecoveryShare, transfer: Transfer) -> torch.dtype:
    return share.bundles[transfer.tensor].torch_dtype
