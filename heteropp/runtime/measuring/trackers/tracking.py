"""Which services a run's figures go to."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from heteropp.description.files import read_json, write_text

if TYPE_CHECKING:
    from heteropp.runtime.measuring.metrics import StepMetrics

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}
NAMES = ("tensorboard", "wandb", "mlflow")  # of --track; --metrics-port is Prometheus's
IDENTITIES = "trackers.json"  # in the run's folder: what the services call this run
MOST_PORT = 65535


class TrackingError(ValueError):
    """A service that cannot be opened; the message is one sentence."""


class Tracker(Protocol):
    """A service that shows the figures of steps."""

    def step(self, metrics: StepMetrics) -> None:
        """Hands over a step's figures."""

    def close(self) -> None:
        """Ends the run there; nothing is handed over afterwards."""


@dataclass(frozen=True)
class Tracking:
    """What a run was asked to be followed by."""

    names: tuple[str, ...] = ()
    metrics_port: int | None = None  # of Prometheus's endpoint; 0: any that is free
    metrics_host: str = "127.0.0.1"

    def check(self) -> None:
        """Raises TrackingError for what is unknown or not installed."""
        for name in self.names:
            if name not in NAMES:
                raise TrackingError(f"--track is {name}; expected {', '.join(NAMES)}")
        for name in self._wanted():
            if find_spec(PACKAGES[name]) is None:
                option = "--metrics-port" if name == "prometheus" else f"--track {name}"
                raise TrackingError(f"{option} needs a package: pip install 'hyperhetero[{name}]'")
        port = self.metrics_port
        if port is not None and not 0 <= port <= MOST_PORT:
            raise TrackingError(f"--metrics-port is {port}; expected 0 to {MOST_PORT}")

    def check_port(self) -> None:
        """Raises TrackingError where the endpoint's port is in use on this machine."""
        if (port := self.metrics_port) is None:
            return
        try:
            found = socket.getaddrinfo(self.metrics_host, port, type=socket.SOCK_STREAM)[0]
            with closing(socket.socket(found[0], found[1])) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(found[4])
        except OSError as error:
            raise TrackingError(
                f"--metrics-port {port} on {self.metrics_host} cannot be opened: {error.strerror}"
            ) from None

    def open(
        self, output: Path, completed: int, restarts: int, say: Callable[[str], None]
    ) -> dict[str, Tracker]:
        """Opens them for the run in a folder, by name. Raises TrackingError.

        completed: steps; those that follow are shown. say: takes a line for the screen. After
        restarts, a service that cannot be opened is told of, and the training goes on without it.
        """
        opened: dict[str, Tracker] = {}
        for name in self._wanted():
            try:
                opened[name] = self._tracker(name, output, completed, restarts, say)
            except TrackingError as error:
                if not restarts:
                    raise
                say(f"warning: {error}; the training goes on without it")
        return opened

    def _wanted(self) -> list[str]:
        return [*self.names, *(["prometheus"] if self.metrics_port is not None else [])]

    def _tracker(
        self, name: str, output: Path, completed: int, restarts: int, say: Callable[[str], None]
    ) -> Tracker:
        if name == "prometheus":
            from heteropp.runtime.measuring.trackers.of_prometheus import Endpoint

            assert self.metrics_port is not None
            endpoint = Endpoint(self.metrics_host, self.metrics_port, restarts)
            say(f"metrics for Prometheus: {endpoint.url}")
            return endpoint
        module = importlib.import_module(f"{__package__}.of_{name}")
        tracker: Tracker = module.TRACKER(output, completed)
        return tracker


def figures(metrics: StepMetrics) -> dict[str, float]:
    """Returns a step's figures under their names in metrics.jsonl, but for the step's number.

    Of the ranks' memory it has the largest; figures of several sets or links are "name/which". What
    the step has not is left out.
    """
    found = asdict(metrics)
    del found["step"]
    found["peak_memory_bytes"] = max(metrics.peak_memory_bytes)
    found["validation_loss/"] = found.pop("validation_losses")
    found["sent_bytes/"] = found.pop("sent_bytes")
    flat: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= {f"{name}{which}": float(one) for which, one in value.items()}
        elif value is not None:
            flat[name] = float(value)
    return flat


def identity(output: Path, service: str, make: Callable[[], str]) -> str:
    """Returns what a service calls the run in a folder; made once, so that a resumed run goes on.

    Raises FileError.
    """
    path = output / IDENTITIES
    known: dict[str, str] = read_json(path, dict[str, str]) if path.exists() else {}
    if service not in known:
        known[service] = make()
        write_text(path, json.dumps(known, indent=2) + "\n")
    return known[service]
