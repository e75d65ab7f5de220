"""Checks of streams and events: what is ordered, and what can be asked."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch

from ditorch.conform.check import Group
from ditorch.conform.runtime_here import (
    DEVICE,
    expect,
    expect_equal,
    expect_error,
    gradient,
    need_accelerator,
    ramp,
)

stream = Group("stream")
event = Group("event")

ROUNDS = 20  # of work: enough for a missing wait to show on a chip that computes asynchronously


def _new_stream(priority: int = 0) -> torch.Stream:
    need_accelerator("streams")
    return torch.Stream(device=DEVICE, priority=priority)


def _new_event(timed: bool = False) -> torch.Event:
    need_accelerator("events")
    return torch.Event(device=DEVICE, enable_timing=timed)


def _here() -> torch.Stream:
    return torch.accelerator.current_stream()


def _work(x: torch.Tensor) -> torch.Tensor:
    """Adds ROUNDS to every element, one launch after the other."""
    for _ in range(ROUNDS):
        x = x + 1
    return x


@stream("one stream's work is done in order")
def _order() -> None:
    _new_stream()
    x = ramp(256, 256)
    for factor in (2, 3):
        x.mul_(factor)
    x.sub_(1)
    expect_equal(x[0, :3].tolist(), [-1, 5, 11], "the elements after three writes")


@stream("a stream is current inside its block, and for this thread only")
def _current() -> None:
    side = _new_stream()
    before = _here()
    expect(side != before, "a new stream is the current one")
    seen: list[torch.Stream] = []
    with side:
        expect_equal(_here(), side, "the current stream inside the block")
        thread = threading.Thread(target=lambda: seen.append(_here()))
        thread.start()
        thread.join(60)
    expect_equal(_here(), before, "the current stream after the block")
    expect(seen != [side], "another thread inherited the stream")


@stream("blocks of streams nest")
def _nest() -> None:
    outer, inner = _new_stream(), _new_stream()
    with outer:
        with inner:
            expect_equal(_here(), inner, "the inner stream")
        expect_equal(_here(), outer, "the outer stream")


@stream("a stream waits for another")
def _wait_stream() -> None:
    side = _new_stream()
    x = ramp(512, 512)
    side.wait_stream(_here())
    with side:
        y = _work(x)
    _here().wait_stream(side)
    z = y * 2
    expect_equal(z[0, :3].tolist(), [40, 42, 44], "what the default stream made of the other's")
    x.record_stream(side)


@stream("synchronize leaves no work, and query says so")
def _synchronize() -> None:
    side = _new_stream()
    side.wait_stream(_here())
    with side:
        y = _work(ramp(128, 128))
    side.synchronize()
    expect(side.query(), "the stream has work after synchronize()")
    expect_equal(y[0, 0].item(), ROUNDS, "the result")


@stream("streams of other priorities work")
def _priorities() -> None:
    for priority in (-1, 0):
        side = _new_stream(priority)
        with side:
            x = _work(ramp(16))
        side.synchronize()
        expect_equal(x[1].item(), ROUNDS + 1, f"a result on a stream of priority {priority}")


@stream("there can be many")
def _many() -> None:
    streams = [_new_stream() for _ in range(40)]
    results = []
    for index, side in enumerate(streams):
        with side:
            results.append(torch.full((8,), float(index), device=DEVICE) + 1)
    torch.accelerator.synchronize()
    expect_equal([r[0].item() for r in results], [i + 1.0 for i in range(40)], "their results")


@stream("backward runs on the stream of its forward")
def _backward() -> None:
    side = _new_stream()
    x = ramp(8, 8).requires_grad_()
    side.wait_stream(_here())
    with side:
        y = (x * x).sum()
    _here().wait_stream(side)
    y.backward()
    torch.accelerator.synchronize()
    expect_equal(gradient(x), 2 * x.detach(), "the gradient")


@event("one that was never recorded has happened")
def _unrecorded() -> None:
    mark = _new_event()
    expect(mark.query(), "query() is false")
    mark.synchronize()
    mark.wait(_here())


@event("after synchronize it has happened")
def _happened() -> None:
    mark = _new_event()
    y = _work(ramp(128, 128))
    mark.record()
    mark.synchronize()
    expect(mark.query(), "query() is false after synchronize()")
    expect_equal(y[0, 0].item(), ROUNDS, "the work before it")


@event("a stream that waits for it sees the work before it")
def _orders() -> None:
    side, mark = _new_stream(), _new_event()
    x = ramp(512, 512)
    y = _work(x)
    mark.record()
    side.wait_event(mark)
    with side:
        z = y + 1
    side.synchronize()
    expect_equal(z[0, 0].item(), ROUNDS + 1, "what the waiting stream read")
    y.record_stream(side)


@event("it can be recorded again, on another stream too")
def _again() -> None:
    side, mark = _new_stream(), _new_event()
    mark.record()
    with side:
        x = _work(ramp(64))
        mark.record()
    mark.synchronize()
    expect_equal(x[0].item(), ROUNDS, "the work before the second mark")


@event("elapsed time is measured in milliseconds and adds up")
def _elapsed() -> None:
    marks = [_new_event(timed=True) for _ in range(3)]
    x = ramp(256, 256)
    for mark in marks:
        mark.record()
        x = x @ x * 0
    marks[-1].synchronize()
    first, second = (a.elapsed_time(b) for a, b in pairwise(marks))
    whole = marks[0].elapsed_time(marks[2])
    expect(first > 0 and second > 0, f"{first} and {second} ms for products of 256 x 256")
    expect(abs(first + second - whole) < 1e-2, f"{first} + {second} ms are not {whole} ms")
    expect(whole < 60_000, f"{whole} ms for two small products: is the unit right?")


@event("an interval that cannot be measured is refused")
def _refused() -> None:
    recorded, untimed = _new_event(timed=True), _new_event()
    recorded.record()
    untimed.record()
    torch.accelerator.synchronize()
    never = _new_event(timed=True)
    kinds = (RuntimeError, ValueError)
    expect_error(kinds, lambda: recorded.elapsed_time(never), "the time to an unrecorded event")
    expect_error(kinds, lambda: recorded.elapsed_time(untimed), "the time to an untimed event")


@event("it may be dropped while a stream still waits for it")
def _dropped() -> None:
    side = _new_stream()
    for _ in range(10):
        mark = _new_event()
        x = _work(ramp(64))
        mark.record()
        side.wait_event(mark)
        del mark
    side.synchronize()
    expect_equal(x[0].item(), ROUNDS, "the work")
