"""Checks of devices, of torch.accelerator, and of the account of launches."""

from __future__ import annotations

import threading

import torch

import ditorch
from ditorch import _ditorch
from ditorch.conform.check import Group, Unsupported
from ditorch.conform.runtime_here import (
    DEVICE,
    device_module,
    expect,
    expect_equal,
    expect_error,
    from_accelerator,
    need_accelerator,
    ramp,
)

device = Group("device")
accelerator = Group("accelerator")
launch = Group("launch")


@device("tensors report the honest device")
def _honest() -> None:
    expect_equal(torch.ones(2, device="device").device, DEVICE, "the device of a tensor")
    expect_equal(torch.device("device").type, DEVICE.type, "what 'device' means")


@device("factories take the device as a string, a torch.device and with an index")
def _factories() -> None:
    for name in ("device", DEVICE, DEVICE.type, f"{DEVICE.type}:0"):
        for made in (
            torch.zeros(2, device=name),
            torch.arange(3, device=name),
            torch.full((2,), 7, device=name),
            torch.tensor([1.5], device=name),
            torch.empty(2).to(name),
        ):
            expect_equal(made.device.type, DEVICE.type, f"the device of a tensor on {name}")


@device("the current device is one of those counted")
def _count() -> None:
    module = device_module()
    count, current = module.device_count(), module.current_device()
    expect(module.is_available(), "is_available() is false")
    expect(0 <= current < count, f"the current device is {current} of {count}")


@device("an index beyond the last device is refused")
def _out_of_range() -> None:
    count = device_module().device_count()
    expect_error(
        (RuntimeError, AssertionError),
        lambda: torch.empty(1, device=f"{DEVICE.type}:{count}"),
        f"device {count} of {count}",
    )


@device("a device set inside a block is set back after it")
def _device_block() -> None:
    module = device_module()
    before = module.current_device()
    with module.device(module.device_count() - 1):
        expect_equal(module.current_device(), module.device_count() - 1, "the current device")
    expect_equal(module.current_device(), before, "the current device after the block")


@device("torch.device is a context for factories")
def _default_device() -> None:
    with torch.device(DEVICE):
        expect_equal(torch.ones(2).device.type, DEVICE.type, "the device inside the block")
    expect_equal(torch.ones(2).device.type, "cpu", "the device after the block")


@device("each thread has a current device of its own")
def _thread_device() -> None:
    module = device_module()
    if module.device_count() < 2:
        raise Unsupported("this process has one device")
    seen: list[int] = []
    with module.device(1):
        thread = threading.Thread(target=lambda: seen.append(module.current_device()))
        thread.start()
        thread.join(60)
    expect_equal(seen, [0], "the current device of a new thread")


@device("operators refuse to mix it with host tensors")
def _mixed() -> None:
    need_accelerator("device apart from the host's")
    x = ramp(3)
    expect_error(RuntimeError, lambda: x + torch.ones(3), "a host tensor beside a device tensor")
    expect_equal((x + torch.tensor(1.0)).tolist(), [1, 2, 3], "x + a 0-dimensional host tensor")


@device("a tensor prints its values and its device")
def _repr() -> None:
    text = repr(torch.tensor([1.0, 2.0], device=DEVICE))
    expect("1." in text and "2." in text, f"the values are missing from {text}")
    expect(DEVICE.type == "cpu" or f"device='{DEVICE}'" in text, f"no device in {text}")


@device("is_<device> and the dispatch key name the device")
def _attributes() -> None:
    need_accelerator("attribute is_cpu worth a check")
    x = ramp(2)
    expect(bool(getattr(x, f"is_{DEVICE.type}")), f"is_{DEVICE.type} is false")
    expect(not x.is_cpu, "is_cpu is true")


@accelerator("torch.accelerator is this device")
def _accelerator_is_here() -> None:
    need_accelerator("torch.accelerator")
    expect(torch.accelerator.is_available(), "torch.accelerator.is_available() is false")
    current = torch.accelerator.current_accelerator()
    expect_equal(current and current.type, DEVICE.type, "the current accelerator")
    expect(torch.accelerator.device_count() >= 1, "torch.accelerator counts no device")


@accelerator("the device index can be set and is set back")
def _accelerator_index() -> None:
    need_accelerator("torch.accelerator")
    before = torch.accelerator.current_device_index()
    last = torch.accelerator.device_count() - 1
    torch.accelerator.set_device_index(last)
    try:
        expect_equal(torch.accelerator.current_device_index(), last, "the device index")
    finally:
        torch.accelerator.set_device_index(before)
    with from_accelerator("device_index")(last):
        expect_equal(torch.accelerator.current_device_index(), last, "the index in the block")
    expect_equal(torch.accelerator.current_device_index(), before, "the index after the block")


@accelerator("synchronize waits for everything")
def _accelerator_synchronize() -> None:
    need_accelerator("torch.accelerator")
    side = torch.Stream(device=DEVICE)
    with side:
        x = ramp(64, 64) @ ramp(64, 64)
    torch.accelerator.synchronize()
    expect(side.query(), "a stream still has work after synchronize()")
    expect(torch.accelerator.current_stream().query(), "the default stream still has work")
    del x


@accelerator("the current stream can be set")
def _accelerator_stream() -> None:
    need_accelerator("torch.accelerator")
    before = torch.accelerator.current_stream()
    side = torch.Stream(device=DEVICE)
    torch.accelerator.set_stream(side)
    try:
        expect_equal(torch.accelerator.current_stream(), side, "the current stream")
    finally:
        torch.accelerator.set_stream(before)
    expect_equal(torch.accelerator.current_stream(), before, "the stream set back")


@accelerator("memory statistics are those of the device")
def _accelerator_memory() -> None:
    allocated = from_accelerator("memory_allocated")
    before = allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    expect(allocated() >= before + x.numel(), "memory_allocated() does not see a tensor of 1 MiB")


@launch("an operator without a kernel is counted once")
def _counted() -> None:
    _need_own_library()
    x = ramp(4)
    before = ditorch.fallback_counts().get("cumprod", 0)
    result = x.cumprod(0)
    after = ditorch.fallback_counts().get("cumprod", 0)
    expect_equal(result.tolist(), [0, 0, 0, 0], "the result")
    expect_equal(after - before, 1, "the count of cumprod, for which the ABI has no kernel")


@launch("views and allocations are not counted")
def _not_counted() -> None:
    _need_own_library()
    x = ramp(4, 4)
    before = sum(ditorch.fallback_counts().values())
    x.t()[1:].unsqueeze(0).expand(2, 3, 4).detach()
    torch.empty_like(x)
    x.clone().t_()
    torch.empty(3, device=DEVICE).resize_(5)
    expect_equal(
        sum(ditorch.fallback_counts().values()) - before, 0, "fallbacks of views and allocations"
    )


@launch("counts can be reset")
def _reset() -> None:
    _need_own_library()
    ramp(4).cumprod(0)
    ditorch.reset_fallback_counts()
    expect_equal(ditorch.fallback_counts(), {}, "the counts after a reset")


@launch("what the device computes in the host's stead is right in place and out of place")
def _in_place() -> None:
    x = ramp(4)
    y = x[1:]
    expect(y.mul_(3).add_(1) is y, "an in-place operator returns another tensor")
    expect_equal(x.tolist(), [0, 4, 7, 10], "the tensor behind the view that was written to")
    out = torch.empty(0, device=DEVICE)
    torch.cumsum(x, 0, out=out)
    expect_equal(out.tolist(), [0, 4, 11, 21], "an out= argument that had to grow")
    values, indices = torch.sort(x, descending=True)
    expect_equal(values.tolist(), [10, 7, 4, 0], "the first of two results")
    expect_equal(indices.tolist(), [3, 2, 1, 0], "the second of two results")


def _need_own_library() -> None:
    if not _ditorch.is_loaded():
        raise Unsupported("ditorch adopts this device, whose plugin keeps no account of fallbacks")
