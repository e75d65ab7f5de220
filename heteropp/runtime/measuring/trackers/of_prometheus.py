"""The newest step's figures for Prometheus, which asks for them by HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.trackers.tracking import TrackingError, figures

PREFIX = "heteropp_"


class Endpoint(Collector):
    """A server in a thread of this process; every figure is a gauge under its name."""

    def __init__(self, host: str, port: int, restarts: int) -> None:
        self.newest: StepMetrics | None = None
        self.restarts = restarts
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self.server, self.thread = start_http_server(port, host, registry)
        except OSError as error:
            raise TrackingError(
                f"--metrics-port {port} on {host} cannot be opened: {error.strerror}"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server.server_port}/metrics"

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gives the figures of one step, whatever the training does meanwhile."""
        yield _gauge("restarts", self.restarts)
        if (metrics := self.newest) is None:
            return
        found = figures(metrics)
        del found["peak_memory_bytes"]
        yield _gauge("step", metrics.step)
        for name, value in found.items():
            yield _gauge(name, value)
        memory = GaugeMetricFamily(f"{PREFIX}peak_memory_bytes", "of each rank", labels=["rank"])
        for rank, memory_bytes in enumerate(metrics.peak_memory_bytes):
            memory.add_metric([str(rank)], memory_bytes)
        yield memory

    def step(self, metrics: StepMetrics) -> None:
        """Shows a step in place of the one before."""
        self.newest = metrics

    def close(self) -> None:
        """Ends the server, so that another may have its port."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def _gauge(name: str, value: float) -> GaugeMetricFamily:
    label = PREFIX + re.sub(r"\W", "_", name)
    return GaugeMetricFamily(label, "of the newest step", value=value)
