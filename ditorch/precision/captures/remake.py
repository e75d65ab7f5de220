"""A captured call made again, from its operator's name, its arguments in JSON and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ditorch.precision.call import Call
from ditorch.precision.captures.arguments import NotReplayable, dtype_called, from_json
from ditorch.precision.captures.recording import Recording
from ditorch.precision.captures.records import CallRecord, TensorUse


def remake_call(recording: Recording, step: int, record: CallRecord, device: torch.device) -> Call:
    """The call on `device`, its tensors as they were captured.

    Raises:
        NotReplayable: it cannot be made again; the message is a clause that says why.
        ValueError: the capture is damaged; one sentence.
    """
    func = operator_called(record.operator)
    given = [
        tensor if use.device == "cpu" else tensor.to(device)
        for use, tensor in zip(record.inputs, kept_tensors(recording, record.inputs), strict=True)
    ]
    place = record.place(recording.manifest.rank, step)
    try:
        args = tuple(from_json(value, given, device) for value in record.arguments)
        kwargs = {name: from_json(value, given, device) for name, value in record.keywords.items()}
    except NotReplayable:
        raise
    except (IndexError, TypeError, ValueError):
        raise ValueError(
            f"{recording.folder}: the arguments of {place} are not as they were written: the "
            "capture is damaged"
        ) from None
    return Call(func, args, kwargs, place)


def kept_tensors(recording: Recording, uses: Sequence[TensorUse]) -> list[Tensor]:
    """The tensors themselves; one that the call did not read is made with any elements.

    Raises:
        NotReplayable: one was not kept.
        ValueError: the capture is damaged; one sentence.
    """
    found = []
    for use in uses:
        tensor = recording.tensor(use)
        if tensor is None and use.digest == "":
            tensor = torch.zeros(use.shape, dtype=dtype_called(use.dtype))
        if tensor is None:
            raise NotReplayable(f"the capture does not hold its tensor {use.name}")
        found.append(tensor)
    return found


def operator_called(name: str) -> OpOverload:
    """ "aten.mm.default" among the operators torch knows in this process.

    Raises:
        NotReplayable: there is no such operator.
    """
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    if not isinstance(found, OpOverload):
        raise NotReplayable(f"this process has no operator {name}")
    return found
