"""transformers: the device of the Trainer and of pipelines, and the backend of parallel models."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ditorch.process_groups import backend_of


def teach_training_arguments(module: Any, device: torch.device) -> None:
    """The Trainer takes the device that accelerate has chosen, and bfloat16 on it."""
    arguments = module.TrainingArguments
    choose = arguments.device.fget

    def chosen(self: Any) -> torch.device:
        found: torch.device = choose(self)
        state = self.distributed_state
        return state.device if found.type == "cpu" and state is not None else found

    knows_bfloat16 = module.is_torch_bf16_gpu_available
    arguments.device = property(chosen, doc=arguments.device.__doc__)
    module.is_torch_bf16_gpu_available = lambda: bool(
        knows_bfloat16() or torch.get_device_module(device).is_bf16_supported()
    )


def teach_pipelines(module: Any, device: torch.device) -> None:
    """A pipeline without a device, or with a number, uses the chip; -1 is the CPU for it."""
    construct = module.Pipeline.__init__

    @functools.wraps(construct)
    def __init__(self: Any, model: Any, *rest: Any, **named: Any) -> None:
        wanted = named.get("device")
        placed = getattr(model, "hf_device_map", None) is not None
        if not rest and (wanted is None and not placed):
            named["device"] = device
        elif isinstance(wanted, int) and wanted >= 0:
            named["device"] = torch.device(device.type, wanted)
        construct(self, model, *rest, **named)

    module.Pipeline.__init__ = __init__


def teach_distributed(module: Any, device: torch.device) -> None:
    """from_pretrained(tp_plan="auto") makes the process group itself, by a table of backends.

    Releases before 5.23 have theirs inside a function, and say themselves that they know no other.
    """
    backends = getattr(module, "DISTRIBUTED_BACKEND_MAP", {})
    if (backend := backend_of(device.type)) != "gloo":
        backends.setdefault(device.type, backend)
