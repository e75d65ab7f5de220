"""An operator's arguments as JSON, and back: nothing is ever evaluated or unpickled.

Numbers, strings, booleans, null and lists stand for themselves; everything else is an object with
one key that says what it is: {"tensor": 0} is the call's first tensor, {"dtype": "float32"} a
dtype. What cannot be made again elsewhere (a generator, a process group) is {"other": its type}.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ditorch.precision.captures.statistics import dtype_name

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


class NotReplayable(ValueError):
    """An argument that cannot be made again; the message is a clause that says which."""


def to_json(value: Any, tensors: list[Tensor]) -> Any:
    """`value` for json.dumps; the tensors in it are appended to `tensors`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (int, torch.SymInt)):
        return int(value)
    if isinstance(value, (float, torch.SymFloat)):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, (list, tuple)):
        return [to_json(each, tensors) for each in value]
    return _tagged(value)


def _tagged(value: Any) -> dict[str, Any]:
    if isinstance(value, complex):
        return {"complex": [str(value.real), str(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    return {"other": type(value).__name__}


def from_json(value: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """The argument again: tensors from `tensors`, every accelerator becomes `device`.

    Raises:
        NotReplayable: it cannot be made again.
    """
    if isinstance(value, list):
        return [from_json(each, tensors, device) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "float":
        return float(content)
    if tag == "complex":
        return complex(*(float(part) for part in content))
    if tag == "device":
        return torch.device("cpu") if content == "cpu" else device
    if tag == "dtype":
        return dtype_called(content)
    if tag == "memory_format" and content in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[content]
    if tag == "layout" and content == "strided":
        return torch.strided
    raise NotReplayable(f"its argument of type {content} cannot be made again")


def dtype_called(name: str) -> torch.dtype:
    """Raises NotReplayable: this torch has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise NotReplayable(f"this torch has no dtype {name}")
    return found
