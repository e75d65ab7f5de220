"""Streams and events keep the emulated time of the work submitted to them."""

import ctypes
import time

import torch

import ditorch


def work() -> torch.Tensor:
    x = torch.ones(256, 256, device="device")
    return x @ x


def test_events_measure_emulated_time() -> None:
    start = torch.Event(device="device", enable_timing=True)
    end = torch.Event(device="device", enable_timing=True)
    start.record()
    for _ in range(5):
        work()
    end.record()
    end.synchronize()
    elapsed_ms = start.elapsed_time(end)
    assert start.query()
    assert end.query()
    assert elapsed_ms > 5 * 2 * 256**3 / 1e11 * 1e3  # no chip of ours does 1e11 FLOP/s per MiB


def test_the_host_runs_ahead_until_it_synchronizes() -> None:
    name, ready_at_ns, _ = ditorch.device_clock() or ("", 0, 0)
    assert name == ditorch.device.type
    ready_at = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
    torch.accelerator.synchronize()
    big = torch.ones(512, 512, device="device")
    for _ in range(3):
        big @ big
    promised = ready_at(0)
    torch.accelerator.synchronize()
    assert time.monotonic_ns() >= promised


def test_waiting_for_a_moment_moves_the_stream_not_the_host() -> None:
    _, ready_at_ns, wait_until_ns = ditorch.device_clock() or ("", 0, 0)
    ready_at = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
    wait_until = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_int64)(wait_until_ns)
    moment = time.monotonic_ns() + 50_000_000
    side = torch.Stream(device="device")
    with side:
        wait_until(0, moment)
        assert ready_at(0) >= moment
        assert not side.query()
    side.synchronize()
    assert time.monotonic_ns() >= moment


def test_current_streams() -> None:
    default = torch.accelerator.current_stream()
    side = torch.Stream(device="device")
    assert side != default
    with side:
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == default


def test_one_stream_waits_for_another() -> None:
    side = torch.Stream(device="device")
    done = torch.Event(device="device")
    _, ready_at_ns, wait_until_ns = ditorch.device_clock() or ("", 0, 0)
    ready_at = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
    wait_until = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_int64)(wait_until_ns)
    moment = time.monotonic_ns() + 50_000_000
    with side:
        wait_until(0, moment)
        done.record()
    torch.accelerator.current_stream().wait_event(done)
    work()
    assert ready_at(0) > moment


def test_backward_on_a_side_stream() -> None:
    x = torch.ones(8, 8, device="device", requires_grad=True)
    with torch.Stream(device="device"):
        y = (x @ x).sum()
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), torch.full((8, 8), 16.0))
