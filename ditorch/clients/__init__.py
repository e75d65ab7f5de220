"""Training libraries that choose the device by a table of vendors, and are taught this one.

accelerate, transformers' Trainer and pipelines, and Lightning ask one vendor after the other and
end at the CPU. Each file here adds this process's device to one library. Nothing is imported for
that: a library is taught when the program imports it. `docs/clients.md` says what then works.
Devices that ditorch adopts are left to their plugins, which have taught the libraries themselves.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Sequence

import torch

# module of a library -> the function that teaches it, and what to do where that fails
_ACCELERATE = "set ACCELERATE_TORCH_DEVICE={device} before the program starts"
_LIGHTNING = "pass strategy=SingleDeviceStrategy(device='{device}') to the Trainer"
_TAUGHT: dict[str, tuple[str, str]] = {
    "torch._inductor.compile_fx": (
        "ditorch.clients.compilers.teach_inductor",
        'use torch.compile(..., backend="aot_eager")',
    ),
    "accelerate.state": ("ditorch.clients.accelerate.teach_state", _ACCELERATE),
    "accelerate.accelerator": (
        "ditorch.clients.accelerate.teach_accelerator",
        "use mixed_precision='bf16' instead of 'fp16'",
    ),
    "transformers.training_args": (
        "ditorch.clients.transformers.teach_training_arguments",
        _ACCELERATE,
    ),
    "transformers.pipelines.base": (
        "ditorch.clients.transformers.teach_pipelines",
        "pass device='{device}' to the pipeline",
    ),
    "transformers.distributed.utils": (
        "ditorch.clients.transformers.teach_distributed",
        "call torch.distributed.init_process_group() before from_pretrained(tp_plan=...)",
    ),
    "lightning.pytorch.trainer.connectors.accelerator_connector": (
        "ditorch.clients.lightning.teach_trainer",
        _LIGHTNING,
    ),
    "pytorch_lightning.trainer.connectors.accelerator_connector": (
        "ditorch.clients.lightning.teach_trainer",
        _LIGHTNING,
    ),
    "lightning.fabric.connector": ("ditorch.clients.lightning.teach_fabric", _LIGHTNING),
    "lightning_fabric.connector": ("ditorch.clients.lightning.teach_fabric", _LIGHTNING),
}


def teach(device: torch.device) -> None:
    """Teaches the libraries that are imported already, and the others as they get imported."""
    for name in _TAUGHT:
        if name in sys.modules:
            _teach_module(sys.modules[name], device)
    sys.meta_path.insert(0, _Watch(device))


def _teach_module(module: types.ModuleType, device: torch.device) -> None:
    """A library that has changed too much is left as it is, with a warning that says so."""
    path, instead = _TAUGHT[module.__name__]
    file, _, function = path.rpartition(".")
    try:
        lesson: Callable[..., None] = getattr(importlib.import_module(file), function)
        lesson(module, device)
    except Exception as error:
        warnings.warn(
            f"ditorch cannot register {device} with {module.__name__} "
            f"({type(error).__name__}: {error}), which may compute on the CPU: "
            f"{instead.format(device=device)}",
            RuntimeWarning,
            stacklevel=2,
        )


class _Watch(importlib.abc.MetaPathFinder):
    """Finds the modules of `_TAUGHT` as Python does, and teaches each once it has run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _TAUGHT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._teach_after(spec.loader)
        return spec

    def _teach_after(self, loader: importlib.abc.Loader) -> None:
        run = loader.exec_module

        @functools.wraps(run)
        def exec_module(module: types.ModuleType) -> None:
            run(module)
            _teach_module(module, self._device)

        loader.exec_module = exec_module  # type: ignore[method-assign]
