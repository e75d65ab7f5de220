"""torch's profiler shows the device's kernels, at times that lie within the run."""

import time

import torch
from torch.profiler import ProfilerActivity, profile

import ditorch  # noqa: F401

x = torch.randn(256, 256, device="device")
x @ x
begin = time.time_ns()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiler:
    for _ in range(3):
        x @ x
    torch.accelerator.synchronize()
end = time.time_ns()
kernels = [event for event in profiler.profiler.kineto_results.events() if event.name() == "mm"]
assert len(kernels) == 3, [event.name() for event in profiler.profiler.kineto_results.events()]
slack_ns = 2_000_000
for kernel in kernels:
    assert kernel.duration_ns() > 0
    assert begin - slack_ns < kernel.start_ns() < kernel.end_ns() < end + slack_ns
print("done")
