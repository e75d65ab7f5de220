"""Lightning: an accelerator "ditorch", which the Trainer and Fabric choose by themselves.

Trainer()                          # or, where another would be chosen:
Trainer(accelerator="ditorch")
"""

from __future__ import annotations

import functools
from typing import Any

import torch

NAME = "ditorch"


def teach_trainer(module: Any, device: torch.device) -> None:
    """lightning.pytorch.Trainer."""
    _teach(module, module.AcceleratorRegistry, module._AcceleratorConnector, device)


def teach_fabric(module: Any, device: torch.device) -> None:
    """lightning.fabric.Fabric."""
    _teach(module, module.ACCELERATOR_REGISTRY, module._Connector, device)


def _teach(module: Any, registry: Any, connector: Any, device: torch.device) -> None:
    accelerator = _make_accelerator(module.Accelerator, device)
    registry.register(NAME, accelerator, description=f"the chip of this process, {device}")
    registry.register("cuda", accelerator, description="what cuda_compat means", override=True)
    _name_honestly(module.MixedPrecision, device)
    connector._choose_auto_accelerator = staticmethod(lambda *_: NAME)
    connector._choose_gpu_accelerator_backend = staticmethod(lambda *_: NAME)
    choose = connector._choose_strategy

    @functools.wraps(choose)
    def choose_strategy(self: Any) -> Any:
        strategy = choose(self)
        if isinstance(strategy, module.SingleDeviceStrategy) and isinstance(
            self.accelerator, accelerator
        ):
            return module.SingleDeviceStrategy(device=self._parallel_devices[0])
        return strategy

    connector._choose_strategy = choose_strategy


def _name_honestly(mixed_precision: Any, chip: torch.device) -> None:
    """MixedPrecision is told "cuda" for everything but the CPU."""
    construct = mixed_precision.__init__

    @functools.wraps(construct)
    def __init__(self: Any, precision: Any, device: str, *rest: Any, **named: Any) -> None:
        construct(self, precision, chip.type if device == "cuda" else device, *rest, **named)

    mixed_precision.__init__ = __init__


def _make_accelerator(base: type, device: torch.device) -> type:
    """A subclass of the library's own Accelerator: there are two libraries, and two of each."""
    chips = torch.get_device_module(device)

    class ChipAccelerator(base):  # type: ignore[misc, valid-type]
        """The chip that ditorch has found."""

        def setup_device(self, device: torch.device) -> None:
            chips.set_device(device)

        def teardown(self) -> None:
            chips.empty_cache()

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return dict(chips.memory_stats(device))

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            if isinstance(devices, str):
                devices = [int(part) for part in devices.split(",")] if "," in devices else devices
                devices = int(devices) if isinstance(devices, str) else devices
            count = chips.device_count()
            if isinstance(devices, int):
                devices = range(count if devices == -1 else devices)
            if missing := [index for index in devices if index >= count]:
                raise ValueError(
                    f"devices={missing} of {device.type}: this process has {count}; start one "
                    "process a chip with torchrun"
                )
            return list(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device(device.type, index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            count: int = chips.device_count()
            return count

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

    return ChipAccelerator
