"""Planners, the simulator, and the orders of schedules."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from heteropp.api.given import the_cluster, the_model
from heteropp.description.plan import Schedule
from heteropp.schedule.orders import ORDERS
from heteropp.search.planner import Request, planner
from heteropp.simulator.simulate import simulate

STAGES, MICRO_BATCHES = 16, 128
REQUESTS = {
    "quickstart": ("quickstart", "quickstart", 16),
    "h2-exp-a": ("h2-100b", "h2-exp-a", 512),
}


def asked(name: str) -> Request:
    model, cluster, global_batch = REQUESTS[name]
    return Request(cluster=the_cluster(cluster), model=the_model(model), global_batch=global_batch)


@pytest.mark.benchmark(group="planners")
@pytest.mark.parametrize(
    ("name", "by"), [("quickstart", "exact"), ("quickstart", "auto"), ("h2-exp-a", "exact")]
)
def test_planner(name: str, by: str, benchmark: Any) -> None:
    benchmark.pedantic(planner(by), args=(asked(name),), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="simulator")
@pytest.mark.parametrize("name", REQUESTS)
def test_simulator(name: str, benchmark: Any) -> None:
    this = asked(name)
    benchmark(simulate, planner("exact")(this).best.plan, this.cluster)


@pytest.mark.benchmark(group="schedules: orders of 16 stages, 128 micro-batches")
@pytest.mark.parametrize("schedule", [s for s in get_args(Schedule) if s != "chimera"])
def test_orders(schedule: Schedule, benchmark: Any) -> None:
    ministages = 2 if schedule in ("zb-v", "interleaved-1f1b") else 1

    def orders() -> None:
        for stage in range(STAGES):
            list(ORDERS[schedule](STAGES, stage, MICRO_BATCHES, ministages))

    benchmark(orders)
