"""What no ministage at work needs waits in host memory (Zorse, sections 4.1.1, 4.1.3 and 5.4).

On the chip are the parameters of two ministages, the one at work and the next, and what two
forwards keep: that of the backward at work and of the next. All else comes and goes on a stream of
its own, beside the work. What moves is whole storages: while one is away it is empty, and the
tensors that view it are good again when it is back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from heteropp.optimizer.zero import FlatParameters
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.residence import (
    BEGINS_BACKWARD,
    NEEDS_PARAMETERS,
    Item,
    backwards,
    following,
)


class Offload:
    """Moves what one stage does not need at the moment to host memory, and back in time.

    `before` is called ahead of every action of a step, in the table's order, and every forward runs
    inside `keeping`.
    """

    def __init__(
        self, actions: Sequence[Action], sections: Sequence[Sequence[FlatParameters]]
    ) -> None:
        """sections: the flat buffers of each ministage."""
        flats = [flat for own in sections for flat in own]
        self.link = HostLink(flats[0].values.device)
        self.parameters = [
            [Moving(flat.values.untyped_storage(), self.link) for flat in own] for own in sections
        ]
        buffers = [buffer for flat in flats for buffer in flat.module.buffers()]
        self.staying = {_key(tensor) for tensor in [*buffers, *(flat.values for flat in flats)]}
        self.following = following(actions)
        self.backwards = backwards(actions)
        self.kept: dict[Item, list[Moving]] = {}
        self.position = self.begun = 0
        first = next(each.ministage for each in actions if each.kind in NEEDS_PARAMETERS)
        self._hold(first, self.following[0])

    def before(self, action: Action) -> None:
        """Makes sure that what an action needs is on the chip, and starts bringing the next's."""
        following = self.following[self.position]
        self.position += 1
        if action.kind in NEEDS_PARAMETERS:
            self._hold(action.ministage, following)
        item = action.ministage, action.micro_batch
        if action.kind in BEGINS_BACKWARD and item in self.kept:
            self._begin_backward()
        if action.kind == Kind.STEP:
            self.position = self.begun = 0

    @contextmanager
    def keeping(
        self, item: Item, given: Tensor, staying: Sequence[Tensor | None]
    ) -> Iterator[None]:
        """Moves what a forward run inside keeps for its backward to host memory.

        It stays on the chip if that backward is the next one. given: the forward's input; staying:
        tensors that stay on the chip for the whole step.
        """
        stays = self.staying | {_key(tensor) for tensor in staying if tensor is not None}
        kept = {_key(given): given.untyped_storage()}

        def keep(tensor: Tensor) -> Tensor:
            kept[_key(tensor)] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self.kept[item] = [
            Moving(storage, self.link)
            for key, storage in kept.items()
            if key not in stays and storage.nbytes()
        ]
        kept.clear()  # the hooks live as long as the graph, and would keep all of it
        if item != self.backwards[self.begun]:
            for moving in self.kept[item]:
                moving.leave()

    def load_parameters(self, ministage: int) -> None:
        """Brings a ministage's parameters to the chip between steps, to be read."""
        others = (k for k, own in enumerate(self.parameters) if not any(p.is_away for p in own))
        self._hold(ministage, next((k for k in others if k != ministage), ministage))

    def load_for_update(self, ministage: int) -> None:
        self.load_parameters(ministage)
        for parameters in self.parameters[ministage]:
            parameters.forget()

    def _hold(self, ministage: int, other: int) -> None:
        for k, own in enumerate(self.parameters):
            if k not in (ministage, other):
                for parameters in own:
                    parameters.leave()
        for parameters in (*self.parameters[ministage], *self.parameters[other]):
            parameters.come()
        for parameters in self.parameters[ministage]:
            parameters.wait()

    def _begin_backward(self) -> None:
        for moving in self.kept.pop(self.backwards[self.begun]):
            moving.come()
            moving.wait()
        self.begun += 1
        following = self.backwards[self.begun : self.begun + 1]
        for moving in self.kept.get(following[0], ()) if following else ():
            moving.come()


class Moving:
    """A storage of the chip, which may be away in host memory."""

    def __init__(self, storage: UntypedStorage, link: HostLink) -> None:
        self.storage, self.link = storage, link
        self.size_bytes = storage.nbytes()
        self.copy: Tensor | None = None  # on the host, equal to what is or was on the chip
        self.arrival: torch.Event | None = None

    @property
    def is_away(self) -> bool:
        return self.storage.nbytes() == 0

    def leave(self) -> None:
        if self.is_away:
            return
        self.wait()
        if self.copy is None:
            self.copy = self.link.to_host(self.storage)
        self.storage.resize_(0)

    def come(self) -> None:
        """Starts the way back to the chip; `wait` must be called before the storage is used."""
        if self.is_away:
            assert self.copy is not None
            self.storage.resize_(self.size_bytes)
            self.arrival = self.link.to_chip(self.copy, self.storage)

    def wait(self) -> None:
        if self.arrival is not None:
            torch.accelerator.current_stream().wait_event(self.arrival)
            self.arrival = None

    def forget(self) -> None:
        """Drops the host's copy, as what is on the chip will change."""
        self.wait()
        self.copy = None


class HostLink:
    """Copies between a chip and its host, in order, on a stream of their own if it has any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    def to_host(self, storage: UntypedStorage) -> Tensor:
        """Returns a host tensor that holds the bytes once the stream has copied them.

        The storage may be freed at once.
        """
        there = self._bytes(storage)
        if self.stream is None:
            return there.clone()
        here = torch.empty(len(there), dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            here.copy_(there, non_blocking=True)
        there.record_stream(self.stream)
        return here

    def to_chip(self, here: Tensor, storage: UntypedStorage) -> torch.Event | None:
        """Starts to fill a storage on the chip; returns the event to wait for, if there is one."""
        there = self._bytes(storage)
        if self.stream is None:
            there.copy_(here)
            return None
        self.stream.wait_stream(torch.accelerator.current_stream())  # the memory was another's
        with self.stream:
            there.copy_(here, non_blocking=True)
            return self.stream.record_event()

    def _bytes(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
