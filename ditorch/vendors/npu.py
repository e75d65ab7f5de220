"""Huawei's Ascend: the plugin torch_npu.

Its collectives (HCCL) reduce no 64-bit floating point and, in the plugin's older releases, do not
average.
"""

from __future__ import annotations

import functools

import torch

from ditorch.vendors.plugin import look_for
from ditorch.vendors.vendor import Quirks, Vendor

VENDOR = Vendor(
    "npu",
    "Huawei",
    functools.partial(look_for, "torch_npu", "npu"),
    Quirks(average_by_sum=True, collectives_refused={torch.float64: torch.float32}),
)
