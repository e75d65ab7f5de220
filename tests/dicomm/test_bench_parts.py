"""What dicomm-bench says about what it measured."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from dicomm.bench import group, latency, picture, strategies, throughput
from dicomm.bench.chips import ChipLink, read_chip
from dicomm.bench.evidence import evidence, is_met, row, show_bars
from dicomm.bench.quiet import Quiet, Watch, own_cpu_s
from dicomm.bench.rounds import Results, compete
from dicomm.bench.timing import Failed, Order, Timing, over_rounds, timing_of

APIS = ["c++", "python", "torch"]


def measured(sizes: list[int], ours_us: float, gloo_us: float, ucx_us: float) -> Results:
    results = Results()
    names = {f"dicomm {api} shm": ours_us for api in ("C++", "Python", "torch")}
    names |= {"Gloo": gloo_us, "UCX shm": ucx_us}
    for name, us in names.items():
        for size in sizes:
            results.timings[name, ("latency", size)] = Timing(us, us)
    return results


def bars_of(sizes: list[int], results: Results) -> dict[str, tuple[float, float, bool]]:
    found = latency.Latencies(results, sizes, APIS, {"shm": ["Gloo", "UCX shm"]})
    asked = [row for row in latency.rows(found) if row["bar"] is not None]
    return {row["name"]: (row["ours"], row["bar"], is_met(row)) for row in asked}


def test_what_is_asked_over_shared_memory() -> None:
    sizes = list(latency.DEFAULT_SIZES)
    bars = bars_of(sizes, measured(sizes, ours_us=1.0, gloo_us=8.0, ucx_us=0.5))
    assert bars["shm C++: Gloo / dicomm, geometric mean"] == (8.0, 9.94, False)
    assert bars["shm Python: Gloo / dicomm, geometric mean"] == (8.0, 7.0, True)
    assert bars["shm torch: Gloo / dicomm, geometric mean"] == (8.0, 3.5, True)
    assert bars["shm C++ 64 KiB: dicomm / UCX shm"] == (2.0, 1.05, False)
    assert bars["shm C++ 1 MiB: dicomm / UCX shm"] == (2.0, 0.8, False)
    assert bars["shm 1 KiB: torch.distributed beyond the C++ API"] == (0.0, 6.0, True)


def test_what_is_asked_over_tcp() -> None:
    timings = {"dicomm C++ tcp": 2.0, "Gloo": 4.0, "UCX tcp": 1.0}
    results = Results(
        {(n, ("latency", s)): Timing(us, us) for n, us in timings.items() for s in (8, 4096)}
    )
    found = latency.Latencies(results, [8, 4096], ["c++"], {"tcp": ["Gloo", "UCX tcp"]})
    asked = {r["name"]: (r["ours"], r["bar"]) for r in latency.rows(found) if r["bar"] is not None}
    assert asked == {
        "tcp C++ 8 B: dicomm / Gloo": (0.5, 1.0),
        "tcp C++ 4 KiB: dicomm / UCX tcp": (2.0, 1.0),
    }


def test_a_c_program_is_held_against_the_best_one_of_each_size() -> None:
    results = measured([8, 4096], ours_us=1.0, gloo_us=0.1, ucx_us=2.0)
    results.timings["MPI shm", ("latency", 8)] = Timing(1.25, None)
    results.timings["MPI shm", ("latency", 4096)] = Timing(4.0, None)
    found = latency.Latencies(results, [8, 4096], ["c++"], {"shm": ["Gloo", "MPI shm", "UCX shm"]})
    asked = {r["name"]: (r["ours"], r["bar"]) for r in latency.rows(found) if r["bar"] is not None}
    assert asked == {
        "shm C++ 8 B: dicomm / MPI shm": (0.8, 1.05),
        "shm C++ 4 KiB: dicomm / UCX shm": (0.5, 1.05),
    }


def test_a_mean_over_other_sizes_is_held_against_nothing() -> None:
    sizes = [8, 4096]
    bars = bars_of(sizes, measured(sizes, ours_us=1.0, gloo_us=8.0, ucx_us=1.0))
    assert not any("mean" in name for name in bars)


@pytest.mark.parametrize(("others_percent", "verdict"), [(1.0, "missed"), (30.0, "not judged")])
def test_what_a_loud_machine_measured_is_not_judged(others_percent: float, verdict: str) -> None:
    found = row("latency", "us", 2.0, bar=1.0)
    quiet = Quiet(others_percent, spin_median=1.0, spin_worst=1.0)
    console = Console(record=True, width=100)
    show_bars(console, evidence("p2p", [found], quiet, {}))
    assert verdict in console.export_text()


def test_what_is_asked_of_allreduce() -> None:
    cases = [("allreduce", 1 << 10), ("allreduce", 1 << 20)]
    timings = {("dicomm torch shm", case): Timing(10, 20) for case in cases}
    timings |= {("Gloo", case): Timing(30, 60) for case in cases}
    results = {2: Results(timings), 4: Results(timings)}
    found = group.Collectives(results, ["allreduce"], [1 << 10, 1 << 20], "shm", ["Gloo"])
    asked = {r["name"]: (r["bar"], is_met(r)) for r in group.rows(found) if r["bar"] is not None}
    assert asked == {
        "2 ranks, torch: allreduce 1 KiB: Gloo / dicomm": (5.0, False),
        "2 ranks, torch: allreduce 1 MiB: Gloo / dicomm": (2.0, True),
        "4 ranks, torch: allreduce 1 KiB: Gloo / dicomm": (1.0, True),
        "4 ranks, torch: allreduce 1 MiB: Gloo / dicomm": (1.0, True),
    }


def test_throughput_from_the_time_of_a_window() -> None:
    results = Results()
    for name, us in (("dicomm C++ verbs", 1000.0), ("perftest write", 900.0)):
        for kind in ("uni", "bi"):
            results.timings[name, (kind, 1 << 20)] = Timing(us, None)
    peers = {"verbs": ["perftest write"]}
    found = throughput.Throughput(results, [1 << 20], ["uni", "bi"], ["c++"], peers, "GB/s")
    assert found.of("dicomm C++ verbs", "uni", 1 << 20) == pytest.approx(64 * 2**20 / 1e-3 / 1e9)
    assert found.of("dicomm C++ verbs", "bi", 1 << 20) == pytest.approx(128 * 2**20 / 1e-3 / 1e9)
    (asked,) = [row for row in throughput.rows(found) if row["bar"] is not None]
    assert (asked["ours"], asked["bar"], is_met(asked)) == (
        pytest.approx(1.111, rel=1e-3),
        1.25,
        True,
    )


def test_pictures_are_drawn_of_whoever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    sizes = [8, 4096]
    results = measured(sizes, ours_us=1.0, gloo_us=8.0, ucx_us=1.0)
    for case in [("uni", 8), ("uni", 4096), ("barrier", 8)]:
        results.timings["Gloo", case] = Timing(5, 6)
    peers = {"shm": ["Gloo", "UCX shm"], "tcp": ["Gloo", "MPI tcp"]}
    latencies = latency.Latencies(results, sizes, APIS, peers)
    flows = throughput.Throughput(results, sizes, ["uni"], APIS, peers, "messages/s")
    calls = group.Collectives({2: results}, ["barrier"], sizes, "shm", ["Gloo"])
    chip = read_chip("a")
    world = strategies.World((chip, chip), ChipLink(3e-5, 5e9))
    times_us = {(s, n): world.sum_of_parts_us(s, n) for s in strategies.STRATEGIES for n in sizes}
    played = strategies.Strategies(world, sizes, times_us, 50, Quiet(1, 1, 1))
    assert played.fidelity(8) == 1 and 1 < played.ratio(4096) < played.ratio(8)
    for draw, subject in (
        (picture.latencies, latencies),
        (picture.throughputs, flows),
        (picture.collectives, calls),
        (picture.strategies, played),
    ):
        path.unlink(missing_ok=True)
        draw(subject, "a machine", path)
        assert b"<svg" in path.read_bytes()[:1000]


def test_medians_and_tails() -> None:
    timing = timing_of([float(i) for i in range(1, 201)])
    assert timing == Timing(100.5, 198.0)
    rounds = [Timing(1, 2), Timing(3, None), Timing(100, 300)]
    assert over_rounds(rounds) == Timing(3, 151)


class Scripted:
    """A contestant that takes no time and fails where it is told to."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.name, self.fails_at, self.orders = name, fails_at, list[Order]()

    def wait_ready(self) -> None:
        pass

    def measure(self, order: Order) -> Timing:
        self.orders.append(order)
        if order.bytes == self.fails_at:
            raise Failed("it is out of breath")
        return Timing(10.0 * order.bytes, 20.0 * order.bytes)

    def close(self) -> None:
        self.orders.append(Order("closed", 0, 0, 0))


def test_one_that_fails_is_named_and_the_others_go_on() -> None:
    good, bad = Scripted("good"), Scripted("bad", fails_at=2)

    def refuses() -> Scripted:
        raise Failed("it will not start")

    entries = [("good", lambda: good), ("bad", lambda: bad), ("never", refuses)]
    cases = [("latency", 1), ("latency", 2), ("latency", 3)]
    results = compete(entries, cases, repeats=2, round_s=0.001)
    assert results.missing == {"never": "it will not start", "bad, latency": "it is out of breath"}
    assert [results.p50_us("good", case) for case in cases] == [10, 20, 30]
    assert [results.p50_us("bad", case) for case in cases] == [10, None, 30]
    assert good.orders[-1].kind == bad.orders[-1].kind == "closed"
    # 20 us a round trip of 1 byte: a turn of 1 ms has room for 50.
    assert [order.count for order in good.orders if order.bytes == 1] == [3, 50, 50]
    assert results.quiet and "others took" in results.quiet.sentence


def test_cpu_time_of_children_is_our_own_even_when_they_have_ended() -> None:
    before_s = own_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert own_cpu_s() - before_s >= 0.25


def test_cpu_time_of_a_stranger_is_others() -> None:
    watch = Watch()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)"
    # Its parent ends at once, so it is nobody's descendant.
    orphan = subprocess.Popen(
        ["/bin/sh", "-c", '"$0" -c "$1" & exit', sys.executable, burn], stdout=subprocess.PIPE
    )
    orphan.wait()
    assert orphan.stdout and orphan.stdout.readline() == b"done\n"
    orphan.stdout.close()
    assert watch.result().others_percent > 0


def test_slow_motion_changes_times_and_speeds_by_one_factor_and_nothing_else() -> None:
    chip = read_chip("b-mini")
    fast, slow = tomllib.loads(chip.text), tomllib.loads(chip.slowed(50))
    for section, key, factor in (
        ("compute", "launch_s", 50),
        ("compute", "float16_flops", 1 / 50),
        ("compute", "efficiency", 1),
        ("memory", "bandwidth_bytes_per_s", 1 / 50),
        ("memory", "capacity_bytes", 1),
        ("links", "nic_latency_s", 50),
        ("links", "nic_bytes_per_s", 1 / 50),
        ("links", "nics_per_node", 1),
        ("numerics", "split_k", 1),
    ):
        assert slow[section][key] == pytest.approx(fast[section][key] * factor)
    assert slow["numerics"] == fast["numerics"]


def test_a_chip_file_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(read_chip("a").text)
    assert read_chip(str(path)) == read_chip("a")
