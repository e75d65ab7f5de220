"""Measures contestants side by side: in each round everyone takes a turn, so that whatever else
the machine does falls on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from dicomm.bench.quiet import Quiet, Watch
from dicomm.bench.timing import Failed, Order, Timing, over_rounds, window_of

PROBES = 3
MOST = 20_000


class Contestant(Protocol):
    name: str

    def wait_ready(self) -> None: ...
    def measure(self, order: Order) -> Timing: ...
    def close(self) -> None: ...


Entry = tuple[str, Callable[[], Contestant]]  # a name, and what starts it
Case = tuple[str, int]  # kind and bytes of an order


@dataclass
class Results:
    """timings: by contestant and case. missing: why a contestant, or one case of it, has none."""

    timings: dict[tuple[str, Case], Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    quiet: Quiet | None = None

    def p50_us(self, name: str, case: Case) -> float | None:
        timing = self.timings.get((name, case))
        return timing.p50_us if timing else None

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.timings))


def compete(
    entries: Sequence[Entry],
    cases: Sequence[Case],
    repeats: int,
    round_s: float,
) -> Results:
    """round_s: the time of one turn of one contestant."""
    from rich.console import Console

    from hyperhetero.progress import Progress

    results = Results()
    with ExitStack() as stack:
        contestants = _start(entries, results, stack)
        watch = Watch()  # from when all are there; before they leave
        bar = stack.enter_context(Progress(console=Console(stderr=True)))
        task = bar.add_task("measuring", total=len(cases) * repeats * len(contestants))
        for case in cases:
            orders = {
                c.name: order for c in contestants if (order := _sized(c, case, round_s, results))
            }
            rounds: dict[str, list[Timing]] = {}
            for _ in range(repeats):
                for contestant in contestants:
                    bar.advance(task)
                    if contestant.name not in orders:
                        continue
                    try:
                        timing = contestant.measure(orders[contestant.name])
                    except Failed as failure:
                        _miss(results, contestant.name, case, failure)
                        del orders[contestant.name]
                        continue
                    rounds.setdefault(contestant.name, []).append(timing)
                    watch.spin()
            for name in orders:
                results.timings[name, case] = over_rounds(rounds[name])
        results.quiet = watch.result()
    return results


def _start(entries: Sequence[Entry], results: Results, stack: ExitStack) -> list[Contestant]:
    """Starts them all, then waits for each: most of it is waiting."""
    started = []
    for name, start in entries:
        try:
            contestant = start()
        except Failed as failure:
            results.missing[name] = str(failure)
            continue
        stack.callback(contestant.close)
        started.append(contestant)
    ready = []
    for contestant in started:
        try:
            contestant.wait_ready()
            ready.append(contestant)
        except Failed as failure:
            results.missing[contestant.name] = str(failure)
    return ready


def _sized(contestant: Contestant, case: Case, round_s: float, results: Results) -> Order | None:
    """An order that takes about round_s; warms up by trying a small one."""
    kind, size_bytes = case
    window = window_of(size_bytes) if kind in ("uni", "bi") else 1
    try:
        probe = contestant.measure(Order(kind, size_bytes, window, PROBES))
    except Failed as failure:
        _miss(results, contestant.name, case, failure)
        return None
    step_s = probe.p50_us * 1e-6 * (2 if kind == "latency" else 1)
    count = max(PROBES, min(MOST, int(round_s / max(step_s, 1e-8))))
    return Order(kind, size_bytes, window, count)


def _miss(results: Results, name: str, case: Case, failure: Failed) -> None:
    kind, _ = case
    results.missing.setdefault(f"{name}, {kind}", str(failure))
