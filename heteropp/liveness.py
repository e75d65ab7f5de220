"""How many bytes of meta tensors are alive, and their peak, while a piece of a step runs."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRANULARITY_BYTES = 512  # device allocators round up to this


class Liveness(TorchDispatchMode):
    """Counts storages born while it is active, until they die, active or not."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "meta":
                self._add(leaf)
        return result

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def ignore(self, tensor: Tensor) -> None:
        """For tensors that are charged elsewhere: parameters, gradients, constants."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = -(-storage.nbytes() // GRANULARITY_BYTES) * GRANULARITY_BYTES
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size
