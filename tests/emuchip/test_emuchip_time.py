"""Streams, events and pacing. The chips here are so slow that the host always comes first; the
clocks are then exact to the nanosecond."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
from emuchip_vendor import INVALID, NOT_READY, OK, Pacing, Vendor, Work

MS = 1_000_000

# 1 ms a launch; 1 MFLOP/s in float32 and 0.5 in float64; 1 MB/s
SLOW = {
    "compute__launch_s": 1e-3,
    "compute__efficiency": 0.5,
    "compute__float32_flops": 1e6,
    "compute__float64_flops": 5e5,
    "memory__bandwidth_bytes_per_s": 1e6,
}


@pytest.fixture
def slow(emulate: Any) -> Vendor:
    return emulate(**SLOW)


def ahead(vendor: Vendor, stream: ctypes.c_void_p | None = None, by_ms: int = 1000) -> int:
    """Puts a stream's clock in the future, so that what follows does not depend on the host."""
    until_ns = time.monotonic_ns() + by_ms * MS
    assert vendor.runtime.stream_wait_until_ns(0, stream, until_ns) == OK
    assert vendor.ready_at_ns(stream) == until_ns
    return until_ns


@pytest.mark.parametrize(
    "work, duration_ms",
    [
        ({}, 1),
        ({"flops": 4000.0}, 1 + 4),
        ({"flops": 4000.0, "dtype": 1}, 1 + 8),
        ({"bytes": 7000.0}, 1 + 7),
        ({"flops": 4000.0, "bytes": 7000.0}, 1 + 7),
        ({"flops": 9000.0, "bytes": 7000.0}, 1 + 9),
        ({"name": b"mm", "flops": 4000.0}, 1 + 8),  # half of the peak: the chip's efficiency
        ({"name": b"aten::addmm.out", "flops": 4000.0}, 1 + 8),
        ({"name": b"baddbmm_", "flops": 4000.0}, 1 + 8),
        ({"name": b"mm", "flops": 4000.0, "bytes": 7500.0}, 1 + 8),
        ({"name": b"mm", "bytes": 7000.0}, 1 + 7),
        ({"name": b"mmul", "flops": 4000.0}, 1 + 4),
        ({"name": b"bmm", "flops": 4000.0, "host_fallback": 1}, 1 + 8),
    ],
)
def test_work_advances_the_clock_by_the_roofline(
    slow: Vendor, work: dict[str, Any], duration_ms: int
) -> None:
    before_ns = ahead(slow)
    assert slow.work(**work) == OK
    assert slow.ready_at_ns() - before_ns == duration_ms * MS


def test_work_on_an_idle_stream_starts_when_it_is_submitted(slow: Vendor) -> None:
    before_ns = time.monotonic_ns()
    assert slow.work(flops=20_000.0) == OK
    after_ns = time.monotonic_ns()
    assert before_ns + 21 * MS <= slow.ready_at_ns() <= after_ns + 21 * MS


def test_a_host_slower_than_the_chip_delays_the_clock(emulate: Any) -> None:
    vendor = emulate(compute__launch_s=0)
    vendor.runtime.pacing_reset(0)
    assert vendor.runtime.work_begin(0, None) == OK
    time.sleep(0.02)
    done_ns = time.monotonic_ns()
    assert vendor.runtime.work_end(0, None, ctypes.byref(described(flops=1000.0))) == OK
    assert vendor.ready_at_ns() >= done_ns
    pacing = vendor.pacing()
    assert pacing.lost_s >= 0.02
    assert pacing.elapsed_s == pytest.approx(pacing.busy_s + pacing.lost_s, abs=1e-8)


def described(**work: Any) -> Work:
    values = {"name": b"add", "flops": 0.0, "bytes": 0.0, "dtype": 0, **work}
    return Work(struct_size=ctypes.sizeof(Work), **values)


@pytest.mark.parametrize(
    "work", [{"flops": -1.0}, {"bytes": -1.0}, {"flops": float("nan")}, {"flops": 1e30}]
)
def test_work_that_makes_no_sense_is_invalid_and_takes_no_time(
    slow: Vendor, work: dict[str, Any]
) -> None:
    before_ns = ahead(slow)
    assert slow.work(name=b"conv", **work) == INVALID
    assert "conv" in slow.error()
    assert slow.ready_at_ns() == before_ns


def test_work_end_needs_a_work_begin_of_its_thread(slow: Vendor) -> None:
    slow.work()
    statuses: list[int] = []

    def end_only() -> None:
        statuses.append(slow.runtime.work_end(0, None, ctypes.byref(described())))

    thread = threading.Thread(target=end_only)
    thread.start()
    thread.join(30)
    assert statuses == [INVALID]


def test_streams_run_side_by_side_and_the_device_waits_for_all(slow: Vendor) -> None:
    first, second = slow.stream(), slow.stream()
    start_ns = ahead(slow, first, 200)
    assert slow.runtime.stream_wait_until_ns(0, second, start_ns) == OK
    slow.work(first, flops=10_000.0)
    slow.work(second, flops=30_000.0)
    assert slow.ready_at_ns(first) - start_ns == 11 * MS
    assert slow.ready_at_ns(second) - start_ns == 31 * MS
    assert slow.runtime.stream_query(0, second) == NOT_READY
    assert slow.runtime.stream_destroy(0, second) == OK  # its work is still done
    assert slow.runtime.device_synchronize(0) == OK
    assert time.monotonic_ns() >= start_ns + 31 * MS
    assert slow.runtime.stream_query(0, first) == OK


def test_synchronize_holds_the_host_until_the_emulated_moment(slow: Vendor) -> None:
    ready_ns = ahead(slow, by_ms=200)
    assert slow.runtime.stream_query(0, None) == NOT_READY
    assert slow.runtime.stream_synchronize(0, None) == OK
    assert time.monotonic_ns() >= ready_ns
    assert slow.runtime.stream_query(0, None) == OK


def test_a_stream_waits_for_another_ones_event(slow: Vendor) -> None:
    producer, consumer, event = slow.stream(), slow.stream(), slow.event()
    start_ns = ahead(slow, producer)
    slow.work(producer, flops=9000.0)
    assert slow.runtime.event_record(0, event, producer) == OK
    slow.work(producer, flops=50_000.0)  # after the event: not waited for
    assert slow.runtime.stream_wait_event(0, consumer, event) == OK
    slow.work(consumer, flops=4000.0)
    assert slow.ready_at_ns(consumer) - start_ns == (1 + 9 + 1 + 4) * MS


def test_a_wait_for_the_past_changes_nothing(slow: Vendor) -> None:
    before_ns = ahead(slow)
    assert slow.runtime.stream_wait_until_ns(0, None, before_ns - 10 * MS) == OK
    assert slow.ready_at_ns() == before_ns


def test_a_wait_for_a_moment_that_never_comes_is_invalid(slow: Vendor) -> None:
    assert slow.runtime.stream_wait_until_ns(0, None, 2**62) == INVALID
    assert "more than an hour" in slow.error()
    assert slow.runtime.stream_query(0, None) == OK


def test_events_measure_the_work_between_them(slow: Vendor) -> None:
    start, end = slow.event(), slow.event()
    ahead(slow, by_ms=200)
    assert slow.runtime.event_record(0, start, None) == OK
    slow.work(flops=7000.0)
    slow.work(name=b"mm", flops=2000.0)
    assert slow.runtime.event_record(0, end, None) == OK
    assert slow.elapsed_ns(start, end)[0] == NOT_READY
    assert slow.runtime.event_query(0, end) == NOT_READY
    end_ns = slow.ready_at_ns()
    assert slow.runtime.event_synchronize(0, end) == OK
    assert time.monotonic_ns() >= end_ns
    assert slow.runtime.event_query(0, end) == OK
    assert slow.elapsed_ns(start, end) == (OK, (1 + 7 + 1 + 4) * MS)
    assert slow.elapsed_ns(end, start) == (OK, -(1 + 7 + 1 + 4) * MS)


def test_an_event_on_an_idle_stream_happens_when_it_is_recorded(slow: Vendor) -> None:
    slow.work()
    assert slow.runtime.device_synchronize(0) == OK
    time.sleep(0.02)
    start, end = slow.event(), slow.event()
    recorded_ns = time.monotonic_ns()
    assert slow.runtime.event_record(0, start, None) == OK
    slow.work(flops=5000.0)
    submitted_ns = time.monotonic_ns()
    assert slow.runtime.event_record(0, end, None) == OK
    assert slow.runtime.event_synchronize(0, end) == OK
    status, elapsed_ns = slow.elapsed_ns(start, end)
    assert status == OK
    assert 6 * MS <= elapsed_ns <= 6 * MS + submitted_ns - recorded_ns


def test_events_that_cannot_be_measured_say_why(slow: Vendor) -> None:
    timed, untimed, unrecorded = slow.event(), slow.event(timed=False), slow.event()
    for event in (timed, untimed):
        assert slow.runtime.event_record(0, event, None) == OK
    assert slow.elapsed_ns(timed, untimed)[0] == INVALID
    assert "not timed" in slow.error()
    assert slow.elapsed_ns(timed, unrecorded)[0] == INVALID
    assert "not been recorded" in slow.error()
    assert slow.runtime.event_query(0, unrecorded) == OK
    assert slow.runtime.event_synchronize(0, unrecorded) == OK
    for event in (timed, untimed, unrecorded):
        assert slow.runtime.event_destroy(0, event) == OK


def test_pacing_of_a_fast_host_is_work_and_waiting_without_loss(slow: Vendor) -> None:
    ahead(slow)
    assert slow.runtime.pacing_reset(0) == OK
    start_ns = slow.ready_at_ns()
    slow.work(flops=9000.0)
    assert slow.runtime.stream_wait_until_ns(0, None, start_ns + 30 * MS) == OK
    slow.work(flops=19_000.0)
    pacing = slow.pacing()
    assert pacing.elapsed_s == pytest.approx(50e-3, rel=1e-12)
    assert pacing.busy_s == pytest.approx(30e-3, rel=1e-12)
    assert pacing.lost_s == 0


def test_pacing_starts_anew_at_a_reset(slow: Vendor) -> None:
    slow.work(flops=5000.0)
    assert slow.runtime.pacing_reset(0) == OK
    pacing = slow.pacing()
    assert (pacing.elapsed_s, pacing.busy_s, pacing.lost_s) == (0, 0, 0)


def test_time_between_operators_is_lost(emulate: Any) -> None:
    vendor = emulate(compute__launch_s=0)
    vendor.work()
    vendor.runtime.pacing_reset(0)
    time.sleep(0.1)
    vendor.work()
    assert vendor.pacing().lost_s >= 0.1


@pytest.mark.parametrize("wait", ["message", "stream", "device", "event"])
def test_time_before_a_wait_is_not_lost(emulate: Any, wait: str) -> None:
    vendor = emulate(compute__launch_s=0)
    vendor.runtime.pacing_reset(0)
    time.sleep(0.1)
    waited_ns = time.monotonic_ns()
    if wait == "message":  # which the host has waited for, and which left long ago
        assert vendor.runtime.stream_wait_until_ns(0, None, waited_ns - 90 * MS) == OK
    elif wait == "stream":
        assert vendor.runtime.stream_synchronize(0, None) == OK
    elif wait == "device":
        assert vendor.runtime.device_synchronize(0) == OK
    else:
        assert vendor.runtime.event_synchronize(0, vendor.event()) == OK
    vendor.work()
    assert vendor.pacing().lost_s <= 1e-9 * (time.monotonic_ns() - waited_ns)


def test_a_released_host_is_late_only_since_its_synchronize(emulate: Any) -> None:
    vendor = emulate(compute__launch_s=0.02)
    vendor.runtime.pacing_reset(0)
    for _ in range(3):
        vendor.work()
        assert vendor.runtime.stream_synchronize(0, None) == OK
    pacing = vendor.pacing()
    assert pacing.busy_s == pytest.approx(0.06, rel=1e-12)
    waiting_s = pacing.elapsed_s - pacing.busy_s - pacing.lost_s
    assert waiting_s >= -1e-9


def test_a_smaller_struct_is_refused(slow: Vendor) -> None:
    assert slow.runtime.pacing(0, ctypes.byref(Pacing(struct_size=8))) == INVALID
    assert "struct_size" in slow.error()


def test_threads_share_a_device_and_no_work_is_forgotten(slow: Vendor) -> None:
    before_ns = ahead(slow, by_ms=2000)

    def submit() -> None:
        for _ in range(200):
            assert slow.work(bytes=1000.0) == OK

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert slow.ready_at_ns() - before_ns == 4 * 200 * 2 * MS


def test_the_span_of_the_last_work_is_its_own_time(slow: Vendor) -> None:
    begin_ns, end_ns = ctypes.c_int64(), ctypes.c_int64()

    def span() -> tuple[int, int]:
        status = slow.runtime.work_span_ns(0, ctypes.byref(begin_ns), ctypes.byref(end_ns))
        assert status == OK
        return begin_ns.value, end_ns.value

    until_ns = ahead(slow)
    assert slow.work(flops=4000.0) == OK
    assert span() == (until_ns, until_ns + 5 * MS)
    assert slow.work() == OK
    assert span() == (until_ns + 5 * MS, until_ns + 6 * MS)
    # A host that is late moves the work, and makes it no longer.
    side, work = slow.stream(), Work(struct_size=ctypes.sizeof(Work), name=b"late")
    assert slow.runtime.work_begin(0, side) == OK
    time.sleep(0.01)
    assert slow.runtime.work_end(0, side, ctypes.byref(work)) == OK
    begun_ns, ended_ns = span()
    assert ended_ns - begun_ns == MS
    assert ended_ns == slow.ready_at_ns(side)


def test_a_thread_that_has_ended_no_work_has_no_span(slow: Vendor) -> None:
    statuses = []

    def ask() -> None:
        begin_ns, end_ns = ctypes.c_int64(), ctypes.c_int64()
        statuses.append(slow.runtime.work_span_ns(0, ctypes.byref(begin_ns), ctypes.byref(end_ns)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert statuses == [INVALID]
