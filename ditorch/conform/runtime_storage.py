"""Checks of storages: what tensors share, and what resizing does."""

from __future__ import annotations

import copy

import torch

from ditorch.conform.check import Group
from ditorch.conform.runtime_here import DEVICE, expect, expect_equal, ramp

storage = Group("storage")


@storage("views share their base's storage")
def _views() -> None:
    x = ramp(4, 4)
    for view in (x.t(), x[1:3, ::2], x.view(-1), x.unfold(0, 2, 1), x.diagonal(), x.detach()):
        expect_equal(
            view.untyped_storage().data_ptr(), x.untyped_storage().data_ptr(), "a view's storage"
        )
    x[:, 1].fill_(-1)
    expect_equal(x.diagonal().tolist(), [0, -1, 10, 15], "a view after its base was written to")


@storage("a write through one view is seen through every other")
def _writes() -> None:
    x = ramp(6)
    even, tail = x[::2], x[2:]
    torch.mul(even, 10, out=even)
    expect_equal(tail.tolist(), [20, 3, 40, 5], "a view that overlaps the one written to")


@storage("views can change the dtype and show complex numbers")
def _dtypes() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
    expect_equal(x.view(torch.int32)[0].item(), 0x3F800000, "the bits of 1.0")
    z = torch.view_as_complex(x.view(2, 2))
    expect_equal(z.conj().imag.tolist(), [-2, -4], "the imaginary part of a conjugate")


@storage("as_strided shows any part of the storage")
def _as_strided() -> None:
    x = torch.as_strided(ramp(16), (2, 3), (5, 1), 2)
    expect_equal(x.tolist(), [[2, 3, 4], [7, 8, 9]], "the strided view")
    expect_equal(x.contiguous().tolist(), [[2, 3, 4], [7, 8, 9]], "its contiguous copy")


@storage("resize_ keeps the elements there are")
def _resize() -> None:
    x = ramp(4)
    x.resize_(6)
    x[4:] = 9
    expect_equal(x.tolist(), [0, 1, 2, 3, 9, 9], "the tensor after it grew")
    x.resize_(2, 1)
    expect_equal(x.tolist(), [[0], [1]], "the tensor after it shrank")
    y = ramp(8)[2:4]
    y.resize_(8)
    expect_equal(y[:6].tolist(), [2, 3, 4, 5, 6, 7], "a view after it grew")


@storage("a storage can be emptied and filled again")
def _storage_resize() -> None:
    x = ramp(1024)
    x.untyped_storage().resize_(0)
    expect_equal(x.untyped_storage().nbytes(), 0, "the bytes of an emptied storage")
    x.untyped_storage().resize_(4096)
    x.copy_(torch.ones(1024))
    expect_equal(x.sum().item(), 1024, "the sum after the storage is back")


@storage("set_ makes a tensor share another's storage")
def _set() -> None:
    x = ramp(4)
    y = torch.empty(0, device=DEVICE).set_(x.untyped_storage())
    y[0] = 5
    expect_equal(x[0].item(), 5, "the element written through the other tensor")
    part = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 1, (2,), (2,))
    expect_equal(part.tolist(), [1, 3], "a part of the storage")
    torch.ops.aten.set_(y)
    expect_equal(y.numel(), 0, "the elements of an emptied tensor")


@storage("untyped storages know their device and size, and copy")
def _untyped() -> None:
    x = ramp(4, dtype=torch.int32)
    mine = x.untyped_storage()
    expect_equal(mine.device, DEVICE, "the storage's device")
    expect_equal(mine.nbytes(), 16, "the storage's bytes")
    expect_equal(list(mine.cpu()[4:8]), [1, 0, 0, 0], "the bytes of its second element")
    twin = mine.clone()
    x.zero_()
    expect_equal(twin.cpu()[4], 1, "a byte of a clone after the original changed")
    mine.copy_(twin)
    expect_equal(x.tolist(), [0, 1, 2, 3], "the tensor after its storage was copied to")
    torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(mine).fill_(1)
    expect_equal(x[0].item(), 0x01010101, "the tensor after its storage was filled")


@storage("tensors and storages are deep-copied once")
def _deepcopy() -> None:
    x = ramp(4)
    twin, view = copy.deepcopy((x, x[1:]))
    view[0] = 7
    expect_equal(twin[1].item(), 7, "the copied base, written to through the copied view")
    expect_equal(x[1].item(), 1, "the original")
    expect_equal(twin.device, DEVICE, "the copy's device")


@storage("tensors swap their data")
def _swap() -> None:
    x, y = ramp(2), ramp(3)
    x.data, y.data = y.data, x.data
    expect_equal((x.tolist(), y.tolist()), ([0, 1, 2], [0, 1]), "the swapped tensors")
    expect(x.is_set_to(x.detach()), "a tensor is not set to its own data")
