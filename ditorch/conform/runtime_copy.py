"""Checks of copies between host and device, and within the device."""

from __future__ import annotations

import torch

from ditorch.conform.check import Group, Unsupported
from ditorch.conform.runtime_here import (
    DEVICE,
    expect,
    expect_equal,
    expect_error,
    need_accelerator,
    ramp,
)

copy = Group("copy")

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


@copy("every dtype comes back as it went")
def _dtypes() -> None:
    missing = []
    for dtype in DTYPES:
        x = (torch.arange(257) % 120).to(dtype)
        try:
            there = x.to(DEVICE)
        except (TypeError, RuntimeError) as error:
            missing.append(f"{dtype}: {str(error).splitlines()[0]}")
            continue
        expect_equal(there.dtype, dtype, "the dtype on the device")
        expect_equal(there.clone().cpu(), x, f"{dtype} after its way to the device and back")
    if missing:
        raise Unsupported("the device lacks " + "; ".join(missing))


@copy("strided tensors go and come")
def _strided() -> None:
    host = torch.arange(24.0).view(2, 3, 4)
    for name, view in (("transposed", host.mT), ("sliced", host[:, ::2, 1:]), ("one", host[1, 1])):
        expect_equal(view.to(DEVICE), view, f"a {name} host tensor on the device")
    there = host.to(DEVICE)
    expect_equal(there.mT.cpu(), host.mT, "a transposed device tensor on the host")
    expect_equal(there[:, ::2, 1:].cpu(), host[:, ::2, 1:], "a sliced device tensor on the host")
    there.mT.copy_(torch.zeros(2, 4, 3))
    expect_equal(there.sum().item(), 0, "the sum after a copy to its transpose")
    there[:, 1].copy_(torch.ones(2, 4))
    expect_equal(there.sum((0, 2)).tolist(), [0, 8, 0], "the sums after a copy to a slice")


@copy("copies convert and broadcast")
def _convert() -> None:
    x = torch.arange(6).view(2, 3)
    expect_equal(x.to(DEVICE, torch.float16).cpu(), x.half(), "integers sent as halves")
    target = torch.zeros(2, 2, 3, device=DEVICE)
    target.copy_(x)
    expect_equal(target.cpu(), x.float().expand(2, 2, 3), "a broadcast from the host")
    back = torch.zeros(2, 2, 3, dtype=torch.int64)
    back.copy_(x.to(DEVICE))
    expect_equal(back, x.expand(2, 2, 3), "a broadcast to the host")
    expect_equal(ramp(3).int().long().float().tolist(), [0, 1, 2], "conversions on the device")


@copy("within the device, between layouts and dtypes")
def _within() -> None:
    x = ramp(3, 4)
    y = torch.empty(4, 3, device=DEVICE)
    y.copy_(x.t())
    expect_equal(y.cpu(), x.cpu().t(), "a transposed copy")
    y.t().copy_(x)
    expect_equal(y.cpu(), x.cpu().t(), "a copy to a transpose")
    z = torch.empty(3, 4, dtype=torch.int32, device=DEVICE).copy_(x)
    expect_equal(z.cpu(), x.cpu().int(), "a converting copy")
    expect_equal(x.contiguous().data_ptr(), x.data_ptr(), "contiguous() of a contiguous tensor")
    expect_equal(x.clone().cpu(), x.cpu(), "a clone")


@copy("onto itself changes nothing; onto an overlapping part it is refused or right")
def _overlap() -> None:
    x = ramp(8)
    x.copy_(x)
    expect_equal(x.tolist(), list(range(8)), "a tensor copied onto itself")
    try:
        x[1:].copy_(x[:-1])
    except RuntimeError:
        expect_equal(x.tolist(), list(range(8)), "the tensor after a refused copy")
    else:
        expect_equal(x.tolist(), [0, *range(7)], "the tensor after an overlapping copy")


@copy("to an expanded tensor it is refused")
def _expanded() -> None:
    target = torch.zeros(1, device=DEVICE).expand(4)
    expect_error(RuntimeError, lambda: target.copy_(ramp(4)), "four elements copied to one place")


@copy("conjugated and negated tensors arrive with their values")
def _lazy() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    expect_equal(z.conj().to(DEVICE), z.conj().resolve_conj(), "a conjugated host tensor sent")
    there = z.to(DEVICE)
    expect_equal(there.conj().cpu().resolve_conj(), z.conj().resolve_conj(), "a conjugate read")
    expect_equal(there.conj().imag.cpu().resolve_neg(), torch.tensor([-2.0, 4.0]), "a negated view")


@copy("scalars are read and written")
def _scalars() -> None:
    x = ramp(4)
    x[2] = 7.5
    expect_equal(x[2].item(), 7.5, "an element read with item()")
    expect_equal(x.tolist(), [0, 1, 7.5, 3], "the tensor as a list")
    expect(bool((x > 7).any()), "the truth of a device tensor")
    expect_equal(int(x.argmax()), 2, "an index as int")


@copy("large and odd sizes arrive whole")
def _sizes() -> None:
    for count in (1, 511, 4097, (1 << 20) + 3):
        x = (torch.arange(count) % 251).to(torch.uint8)
        expect(torch.equal(x.to(DEVICE).cpu(), x), f"{count} bytes changed on the way")


@copy("non_blocking copies are complete once the device is synchronized")
def _non_blocking() -> None:
    need_accelerator("stream to wait for")
    x = torch.arange(100_000.0)
    there = x.to(DEVICE, non_blocking=True)
    torch.accelerator.synchronize()
    back = there.to("cpu", non_blocking=True)
    torch.accelerator.synchronize()
    expect_equal(back, torch.arange(100_000.0), "100,000 elements there and back")


@copy("pinned host memory can be sent from and read into")
def _pinned() -> None:
    need_accelerator("pinned memory")
    try:
        x = torch.arange(1000.0).pin_memory()
    except (RuntimeError, NotImplementedError) as error:
        raise Unsupported(f"no pinned memory: {str(error).splitlines()[0]}") from None
    there = x.to(DEVICE, non_blocking=True)
    back = torch.empty(1000).pin_memory()
    back.copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    expect_equal(back, torch.arange(1000.0), "1,000 elements through pinned memory")


@copy("tensors without elements are copied as such")
def _empty() -> None:
    x = torch.empty(0, 3).to(DEVICE)
    expect_equal(tuple(x.cpu().shape), (0, 3), "the shape of an empty tensor there and back")
    expect_equal(x.clone().numel(), 0, "the elements of its clone")
