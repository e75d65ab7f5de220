"""Streams are ordered by events alone, and events know the time between them."""

import torch

import ditorch  # noqa: F401

x = torch.randn(256, 256)
on_chip = x.to("device")
expected = x.double() @ x.double() @ x.double()
first, last = (torch.Event(device="device", enable_timing=True) for _ in range(2))
side = torch.Stream(device="device")
ready = torch.Event(device="device")
assert ready.query()  # never recorded

first.record()
square = on_chip @ on_chip
ready.record()
with side:
    side.wait_event(ready)
    cube = square @ on_chip
    last.record(side)
last.synchronize()
assert last.query() and first.query() and side.query()
assert first.elapsed_time(last) > 0 > last.elapsed_time(first)
assert torch.allclose(cube.cpu().double(), expected, rtol=1e-4, atol=1e-3)

streams = [torch.Stream(device="device") for _ in range(4)]
results = []
for stream in streams:
    stream.wait_event(ready)
    with stream:
        results.append([on_chip @ on_chip for _ in range(5)])
for stream in streams:
    stream.synchronize()
for result in results:
    for one in result:
        assert torch.equal(one.cpu(), square.cpu())
torch.accelerator.synchronize()
print("done")
