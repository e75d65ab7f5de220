"""Carries out routed transfers over torch.distributed, on the host or on chips.

All that one rank sends another in a round is one message. Ranks are those of the world group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.boxes import Box
from heteropp.hspmd.annotation import Holding
from heteropp.hspmd.resolution import Communication, Step
from heteropp.hspmd.routing import Round, Transfer


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and its values as this rank holds them."""

    tensor: int
    box: Box
    values: Tensor

    def part(self, box: Box) -> Tensor:
        return self.values[box.within(self.box)]


def exchange(
    rounds: Sequence[Round], rank: int, held: Sequence[Piece], wanted: Sequence[Piece]
) -> None:
    """Fills the pieces that this rank wants. Every rank that a transfer names calls it.

    The first round reads what is held, and later ones what the rounds before have filled. A tensor
    has one dtype on all ranks.
    """
    for round_ in rounds:
        _exchange(round_, rank, held, wanted)
        held = wanted


def communicate(
    communication: Communication,
    rank: int,
    local: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """From this rank's part of a tensor to its part under the target annotation.

    None: the rank has no part. One that does not change is given back as it is.
    """
    for step in communication.steps:
        local = _step(step, rank, local, dtype, device)
    return local


def _step(
    step: Step, rank: int, local: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    source, target = _own(step.source, rank), _own(step.target, rank)
    stays = all(t.senders == (t.receiver,) for t in _concerning(step.rounds, rank))
    if stays and source is not None and target is not None and source.box == target.box:
        return local
    held = [Piece(0, source.box, local)] if source is not None and local is not None else []
    if target is None:
        exchange(step.rounds, rank, held, [])
        return None
    result = torch.empty(target.box.shape, dtype=dtype, device=device)
    exchange(step.rounds, rank, held, [Piece(0, target.box, result)])
    return result


def _own(holdings: Sequence[Holding], rank: int) -> Holding | None:
    return next((holding for holding in holdings if holding.rank == rank), None)


def _concerning(rounds: Sequence[Round], rank: int) -> Iterator[Transfer]:
    return (t for round_ in rounds for t in round_ if rank == t.receiver or rank in t.senders)


def _exchange(round_: Round, rank: int, held: Sequence[Piece], wanted: Sequence[Piece]) -> None:
    held_by, wanted_by = _by_tensor(held), _by_tensor(wanted)
    leaving = _start_sends(round_, rank, held_by)
    received = _received(round_, rank, wanted_by)
    for transfer in round_:
        if transfer.receiver != rank:
            continue
        tensor, box = transfer.tensor, transfer.box
        summands = [
            _find(held_by[tensor], box) if sender == rank else received[sender, tensor, box]
            for sender in transfer.senders
        ]
        for piece in wanted_by[tensor]:
            if box.intersect(piece.box) == box:
                _add_up(piece.part(box), summands)
    for work, _ in leaving:
        work.wait()


def _start_sends(
    round_: Round, rank: int, held_by: dict[int, list[Piece]]
) -> list[tuple[dist.Work, Tensor]]:
    """One message to each peer; it must live until it has left."""
    by_peer: dict[int, list[Tensor]] = defaultdict(list)
    for transfer in round_:
        if rank in transfer.senders and transfer.receiver != rank:
            by_peer[transfer.receiver].append(_find(held_by[transfer.tensor], transfer.box))
    leaving = []
    for peer, parts in sorted(by_peer.items()):
        message = _packed(parts)
        work = dist.isend(message, peer)
        assert work is not None
        leaving.append((work, message))
    return leaving


def _received(
    round_: Round, rank: int, wanted_by: dict[int, list[Piece]]
) -> dict[tuple[int, int, Box], Tensor]:
    """What others send this rank, by sender, tensor and box."""
    by_sender: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in round_:
        if transfer.receiver == rank:
            for sender in transfer.senders:
                if sender != rank:
                    by_sender[sender].append(transfer)
    arriving = []
    for sender, transfers in sorted(by_sender.items()):
        size_bytes = sum(transfer.size_bytes for transfer in transfers)
        device = wanted_by[transfers[0].tensor][0].values.device
        message = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        arriving.append((sender, transfers, message, dist.irecv(message, sender)))
    dtypes = {tensor: pieces[0].values.dtype for tensor, pieces in wanted_by.items()}
    received = {}
    for sender, transfers, message, work in arriving:
        assert work is not None
        work.wait()
        for transfer, values in _unpacked(message, transfers, dtypes):
            received[sender, transfer.tensor, transfer.box] = values
    return received


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """One message of bytes; wider dtypes first, so that every part is aligned."""
    parts = sorted(parts, key=lambda part: -part.dtype.itemsize)
    return torch.cat([part.reshape(-1).contiguous().view(torch.uint8) for part in parts])


def _unpacked(
    message: Tensor, transfers: Sequence[Transfer], dtypes: dict[int, torch.dtype]
) -> Iterator[tuple[Transfer, Tensor]]:
    first = 0
    for transfer in sorted(transfers, key=lambda t: -dtypes[t.tensor].itemsize):
        last = first + transfer.size_bytes
        yield transfer, message[first:last].view(dtypes[transfer.tensor]).view(transfer.box.shape)
        first = last


def _add_up(total: Tensor, summands: Sequence[Tensor]) -> None:
    first, *others = summands
    total.copy_(first)
    for summand in others:
        total.add_(summand)


def _by_tensor(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    result: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        result[piece.tensor].append(piece)
    return result


def _find(pieces: Sequence[Piece], box: Box) -> Tensor:
    return next(piece.part(box) for piece in pieces if box.intersect(piece.box) == box)
