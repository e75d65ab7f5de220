"""Which meta tensors are alive while a piece of a step runs: a log of births and deaths."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Liveness(TorchDispatchMode):
    """Logs storages born while it is active, and their deaths, whether it is active then or not."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes_bytes: list[int] = []  # by storage, in order of birth
        self.events: list[int] = []  # a storage's index when it is born, its complement at its end
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch's compiler to do so, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "meta":
                self._add(leaf)
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leaves a tensor out: parameters, gradients and constants are charged elsewhere."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        index = len(self.sizes_bytes)
        self.sizes_bytes.append(storage.nbytes())
        self.events.append(index)
        weakref.finalize(storage, self._remove, key, index).atexit = False

    def _remove(self, key: int, index: int) -> None:
        self._known.discard(key)
        self.events.append(~index)
