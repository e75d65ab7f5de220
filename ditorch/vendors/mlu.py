"""Cambricon's MLUs: the plugin torch_mlu; its collectives (CNCL) sum but do not average."""

from __future__ import annotations

import functools

from ditorch.vendors.plugin import look_for
from ditorch.vendors.vendor import Quirks, Vendor

VENDOR = Vendor(
    "mlu",
    "Cambricon",
    functools.partial(look_for, "torch_mlu", "mlu"),
    Quirks(average_by_sum=True),
)
