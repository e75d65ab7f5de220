"""Moore Threads' GPUs: the plugin torch_musa."""

from __future__ import annotations

import functools

from ditorch.vendors.plugin import look_for
from ditorch.vendors.vendor import Vendor

VENDOR = Vendor(
    "musa",
    "Moore Threads",
    functools.partial(look_for, "torch_musa", "musa"),
)
