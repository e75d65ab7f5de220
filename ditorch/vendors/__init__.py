"""Which vendor's chip this process drives: one small file for each vendor.

A vendor either has a library that speaks ditorch's two C ABIs (`csrc/ditorch/abi`), and ditorch
makes its torch device; or torch has its device already, built in or through a plugin, and ditorch
adopts it.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

from ditorch.vendors import (
    cpu,
    cuda,
    emuchip,
    library,
    mlu,
    mojo,
    mps,
    musa,
    npu,
    opencl,
    privateuse1,
    rocm,
    xpu,
)
from ditorch.vendors.vendor import Look, Quirks, Vendor
from ditorch.vendors.wanted import Wanted, wanted

__all__ = ["VENDORS", "Choice", "Look", "Quirks", "Vendor", "choose_vendor", "look_at"]

# The order of the search. What the environment names goes first; then, as torch.accelerator has
# it, a plugin's device goes before those that torch has built in.
VENDORS: tuple[Vendor, ...] = tuple(
    file.VENDOR
    for file in (
        library,
        emuchip,
        npu,
        mlu,
        musa,
        mojo,
        privateuse1,
        cuda,
        rocm,
        xpu,
        mps,
        opencl,
        cpu,
    )
)


@dataclass(frozen=True)
class Choice:
    vendor: Vendor
    look: Look
    because: str

    @property
    def name(self) -> str:
        return self.look.name or self.vendor.name


@functools.cache
def look_at(vendor: Vendor) -> Look:
    """Looks once; whatever fails is an answer too."""
    try:
        return vendor.look()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Look("broken", f"looking for it failed ({reason})")


def choose_vendor() -> Choice:
    """The vendor that DITORCH_VENDOR or DITORCH_CHIP's file names, else the first in the order of
    VENDORS that is found.

    A plugin that is installed but broken is warned about and passed over, unless it was named.

    Raises:
        ImportError: what was asked for is not there; one sentence with the reason.
    """
    if named := wanted():
        return _named(named)
    for vendor in VENDORS:
        look = look_at(vendor)
        if look.state == "found":
            return Choice(vendor, look, _reason(look))
        if look.asked:
            raise ImportError(look.why)
        if look.state == "broken":
            warnings.warn(
                f"ditorch goes on without {vendor.name}: {look.why}; DITORCH_VENDOR="
                f"{vendor.name} makes this an error, DITORCH_VENDOR=<another> avoids it",
                RuntimeWarning,
                stacklevel=2,
            )
    raise AssertionError("the host is always found")


def _named(named: Wanted) -> Choice:
    vendor = next((vendor for vendor in VENDORS if vendor.name == named.vendor), None)
    if vendor is None:
        names = ", ".join(vendor.name for vendor in VENDORS)
        raise ImportError(
            f"{named.because}, expected one of {names}; a vendor that ditorch does "
            "not know is given by DITORCH_VENDOR_LIBRARY=<its library>"
        )
    look = look_at(vendor)
    if look.state != "found":
        raise ImportError(f"{named.because} but {look.why}")
    return Choice(vendor, look, named.because)


def _reason(look: Look) -> str:
    return look.why if look.asked else "it is the first found, in this order"
