"""What each rank measures of a step, and the line of metrics that rank 0 makes of it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan
from heteropp.description.timeline import Span
from heteropp.description.used_chips import used_cluster
from heteropp.runtime.evaluation import Validation
from heteropp.runtime.executor import StepResult
from heteropp.runtime.measuring.metrics import Mark, StepMetrics
from heteropp.runtime.measuring.sent import SentBytes, by_link
from heteropp.runtime.measuring.shares import StepEnds, divide
from heteropp.runtime.measuring.stragglers import Stragglers
from heteropp.runtime.measuring.utilization import utilization
from heteropp.runtime.ranks.device import Device
from heteropp.schedule.step_times import LinkTimes

if TYPE_CHECKING:  # the prediction is handed in: the runtime knows no simulator
    from heteropp.simulator.expectation import ExpectedStep

Expect = Callable[[Plan, Path], "ExpectedStep | None"]


@dataclass(frozen=True)
class Reading:
    """What one rank measured of one step."""

    step_s: float  # from its first action to the end of its last, by its device's clock
    work: float  # shares of that; see shares.py
    communication: float
    bubble: float
    pacing_fidelity: float | None
    peak_memory_bytes: int
    waited_s: float  # by its host, for messages between stages
    waited_cpu_s: float  # that it computed meanwhile
    sent_bytes: tuple[tuple[int, int], ...] = ()  # (peer, bytes) in the step

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Reading:
        return Reading(**json.loads(text))


class Gauges:
    """Measures the steps of one rank.

    The links' speeds come from what is expected of the cluster; without it, all waits count as
    bubble.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Path | None,
        rank: int,
        labels: Sequence[str],
        device: Device,
        one_plan: bool = True,
        expect: Expect | None = None,
        sent: SentBytes | None = None,
    ) -> None:
        """one_plan: every step runs this plan alone, and can be predicted by `expect`.

        sent: counts what this rank sends; None: nothing does.
        """
        self.sent = sent
        self.plan, self.rank, self.device, self.one_plan = plan, rank, device, one_plan
        self.epoch_s = time.monotonic() - time.time()  # when the time of day was 0
        self.cluster: Cluster | None = None
        self.expected: ExpectedStep | None = None
        self.stragglers: Stragglers | None = None
        self.links = LinkTimes()
        if cluster is None:
            return
        self.cluster = used_cluster(plan, read_cluster(cluster))
        if one_plan and expect:
            self.expected = expect(plan, cluster)
        if self.expected is None:
            return
        self.links = self.expected.links_of(rank)
        self.stragglers = Stragglers(labels, self.expected.replicas, self.expected.work_s)

    def begin(self) -> None:
        """Notes where the counters stand before a step: validation and checkpoints count too."""
        if self.sent:
            self.sent.begin()

    def read(self, result: StepResult) -> Reading:
        """Returns this rank's reading of a step that has ended."""
        seconds = self.device.clock.seconds
        ran = [(action, seconds(begin), seconds(end)) for action, begin, end in result.marks]
        share = divide(ran, StepEnds(*map(seconds, result.step_marks)), self.links)
        return Reading(
            ran[-1][2] - ran[0][1],
            share.work,
            share.communication,
            share.bubble,
            self.device.pacing_fidelity(),
            self.device.peak_memory_bytes(),
            result.waits.seconds,
            result.waits.cpu_s,
            self.sent.new() if self.sent else (),
        )

    def spans(self, result: StepResult) -> list[Span]:
        """Returns when this rank's actions ran, by the time of day, which all machines share."""

        def seconds(mark: Mark) -> float:
            return self.device.clock.seconds(mark) - self.epoch_s

        return [
            Span(self.rank, x.kind, x.micro_batch, seconds(begin), seconds(end), x.ministage)
            for x, begin, end in result.marks
        ]

    def metrics(
        self,
        step: int,
        result: StepResult,
        learning_rate: float,
        validation: Validation | None,
        readings: Sequence[Reading],
    ) -> StepMetrics:
        """Returns the metrics of a step, which takes as long as for its slowest rank.

        readings: by rank.
        """
        plan = self.plan
        step_s = max(reading.step_s for reading in readings)
        fidelities = [r.pacing_fidelity for r in readings if r.pacing_fidelity is not None]
        waited_s = sum(r.waited_s for r in readings)
        tokens_per_s = result.tokens / step_s
        return StepMetrics(
            step=step,
            loss=result.loss,
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            validation_loss=validation.loss if validation else None,
            validation_losses=validation.by_name if validation else {},
            step_s=step_s,
            predicted_step_s=self._predicted_step_s(),
            tokens_per_s=tokens_per_s,
            tokens_per_chip_per_s=tokens_per_s / plan.world_size,
            utilization=self._utilization(tokens_per_s),
            bubble=statistics.mean(r.bubble for r in readings),
            communication=statistics.mean(r.communication for r in readings),
            waiting_cpu=sum(r.waited_cpu_s for r in readings) / waited_s if waited_s else None,
            pacing_fidelity=min(fidelities) if fidelities else None,
            peak_memory_bytes=tuple(r.peak_memory_bytes for r in readings),
            sent_bytes=by_link(self.cluster, [r.sent_bytes for r in readings]),
        )

    def slow_ranks(self, readings: Sequence[Reading]) -> str | None:
        """Returns a sentence that names ranks that have been slow for a while, or None."""
        if self.stragglers is None:
            return None
        fidelities = [r.pacing_fidelity for r in readings if r.pacing_fidelity is not None]
        fidelity = min(fidelities, default=1.0)
        return self.stragglers.watch([r.work * r.step_s for r in readings], fidelity)

    def _utilization(self, tokens_per_s: float) -> float | None:
        """Returns the model FLOPs utilization; None without a cluster file or with several plans.

        Several plans run where sequences differ in length, and then tokens differ in FLOPs.
        """
        if self.cluster is None or not self.one_plan:
            return None
        return utilization(self.plan.model, self.cluster, tokens_per_s)

    def _predicted_step_s(self) -> float | None:
        if not self.one_plan:
            return None
        if self.plan.prediction:
            return self.plan.prediction.step_s
        return self.expected.step_s if self.expected else None
