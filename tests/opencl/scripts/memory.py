"""Copies of all kinds keep the bytes, memory is counted, and its end is torch's own error."""

import torch

import ditorch

assert str(ditorch.device) == "ocl:0" and ditorch.vendor() == "opencl"
torch.manual_seed(0)
for count in (1, 1000, 3_000_000):
    x = torch.randn(count)
    on_chip = x.to("device")
    again = on_chip.clone()
    x.zero_()  # the copy to the device has the values of before
    assert on_chip.cpu().ne(0).all() and torch.equal(on_chip.cpu(), again.cpu())
    assert torch.equal(again[1:].cpu(), again.cpu()[1:])

free, total = torch.accelerator.get_memory_info()
held = torch.empty(64 << 20, dtype=torch.uint8, device="device")
fewer, same = torch.accelerator.get_memory_info()
assert same == total and free - fewer >= 64 << 20
for bytes_wanted in (total, total * 4):
    try:
        torch.empty(bytes_wanted, dtype=torch.uint8, device="device")
    except torch.OutOfMemoryError as error:
        assert "is out of memory: tried to allocate" in str(error), error
    else:
        raise AssertionError("more memory than there is was given")
assert (held + 1).shape == held.shape  # the device goes on
del held
torch.accelerator.memory.empty_cache()
assert torch.accelerator.get_memory_info()[0] >= free
print("done")
