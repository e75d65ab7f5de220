"""The runtime part of the conformance suite: whether a vendor's device behaves as torch expects.

The checks see the device as a script does, through torch alone, so they run on any vendor ditorch
drives: a library that speaks the two ABIs, an adopted plugin, the CPU. They compare exact values
(small integers) and leave precision to the operators' part.
"""

from __future__ import annotations

from ditorch.conform import (
    runtime_autograd,
    runtime_copy,
    runtime_device,
    runtime_files,
    runtime_memory,
    runtime_random,
    runtime_storage,
    runtime_streams,
)
from ditorch.conform.check import Check

CHECKS: tuple[Check, ...] = tuple(
    check
    for group in (
        runtime_device.device,
        runtime_device.accelerator,
        runtime_memory.memory,
        runtime_storage.storage,
        runtime_copy.copy,
        runtime_streams.stream,
        runtime_streams.event,
        runtime_random.generator,
        runtime_files.serialization,
        runtime_autograd.autocast,
        runtime_autograd.autograd,
        runtime_device.launch,
    )
    for check in group.checks
)


def checks() -> list[Check]:
    """Every check, grouped, in the order in which a new vendor makes them pass."""
    return list(CHECKS)
