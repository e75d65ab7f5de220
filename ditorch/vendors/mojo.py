"""Modular's Mojo kernels: the plugin torch_mojo_backend, which makes the device `mojo`.

The plugin makes its device only when it is told to, and finds one on every machine, as the host
counts as one. So it is looked for only where DITORCH_VENDOR or a chip file's driver names it.
"""

from __future__ import annotations

import importlib
import importlib.util

from ditorch.vendors.plugin import look_for, place_taken_by
from ditorch.vendors.vendor import Look, Vendor, not_found
from ditorch.vendors.wanted import wanted

_PACKAGE, _DEVICE_TYPE = "torch_mojo_backend", "mojo"


def look() -> Look:
    named = wanted()
    if named is None or named.vendor != VENDOR.name:
        return not_found("it is looked for only where it is named: DITORCH_VENDOR=mojo")
    if place_taken_by() == "" and importlib.util.find_spec(_PACKAGE) is not None:
        try:
            importlib.import_module(_PACKAGE).register_mojo_devices()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return Look("broken", f"{_PACKAGE} is installed but does not start ({reason})")
    return look_for(_PACKAGE, _DEVICE_TYPE)


VENDOR = Vendor("mojo", "Modular", look)
