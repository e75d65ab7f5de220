"""Carries out routed transfers over torch.distributed, on the host or on chips.

Ranks are those of the world group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.annotation import Holding
from heteropp.layout.hspmd.messages import Messages
from heteropp.layout.hspmd.resolution import Communication, CommunicationStep
from heteropp.layout.hspmd.routing import Round, Transfer


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, and its values as this rank holds them."""

    tensor: int
    box: Box
    values: Tensor


def exchange(
    rounds: Sequence[Round], rank: int, held: Sequence[TensorPiece], wanted: Sequence[TensorPiece]
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
    """Returns this rank's part of a tensor under the target annotation, from its part before.

    None stands for no part, before or after. A part that does not change is returned as it is.
    """
    for step in communication.steps:
        local = _step(step, rank, local, dtype, device)
    return local


def _step(
    step: CommunicationStep,
    rank: int,
    local: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    source, target = _own(step.source, rank), _own(step.target, rank)
    stays = all(t.senders == (t.receiver,) for t in _concerning(step.rounds, rank))
    if stays and source is not None and target is not None and source.box == target.box:
        return local
    held = [TensorPiece(0, source.box, local)] if source is not None and local is not None else []
    if target is None:
        exchange(step.rounds, rank, held, [])
        return None
    result = torch.empty(target.box.shape, dtype=dtype, device=device)
    exchange(step.rounds, rank, held, [TensorPiece(0, target.box, result)])
    return result


def _own(holdings: Sequence[Holding], rank: int) -> Holding | None:
    return next((holding for holding in holdings if holding.rank == rank), None)


def _concerning(rounds: Sequence[Round], rank: int) -> Iterator[Transfer]:
    return (t for round_ in rounds for t in round_ if rank == t.receiver or rank in t.senders)


def _exchange(
    round_: Round, rank: int, held: Sequence[TensorPiece], wanted: Sequence[TensorPiece]
) -> None:
    messages = Messages(round_, rank, _names(held), _names(wanted))
    leaving, arriving, received = [], [], {}
    for peer, message in messages.packed(_values(held)):
        leaving.append((dist.isend(message, peer), message))  # it must live until it has left
    for peer, size_bytes in messages.received_bytes.items():
        message = torch.empty(size_bytes, dtype=torch.uint8, device=wanted[0].values.device)
        arriving.append(dist.irecv(message, peer))
        received[peer] = message
    _wait(arriving)
    messages.add_up(received, _values(held), _values(wanted))
    _wait([work for work, _ in leaving])


def _names(pieces: Sequence[TensorPiece]) -> list[tuple[int, Box]]:
    return [(piece.tensor, piece.box) for piece in pieces]


def _values(pieces: Sequence[TensorPiece]) -> list[Tensor]:
    return [piece.values for piece in pieces]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
