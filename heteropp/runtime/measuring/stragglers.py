"""Names ranks that are slow: chips that throttle, hosts that are busy with something else."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from heteropp.runtime.measuring.metrics import FAITHFUL

SLOW = 1.25  # times as long, of what was predicted, as the median rank's work takes
PATIENCE = 3  # steps in a row
LEAST_S = 1e-3  # of predicted work in a step; of shorter work the host's own time is most


class Stragglers:
    def __init__(
        self,
        labels: Sequence[str],
        replicas: Sequence[tuple[int, ...]],
        predicted_s: Sequence[float],
    ) -> None:
        """labels: by rank; replicas: the ranks of each; predicted_s: each rank's work in a step."""
        self.labels, self.replicas, self.predicted_s = labels, replicas, predicted_s
        self.slow_steps: Counter[tuple[int, ...]] = Counter()  # in a row, by replica

    def watch(self, work_s: Sequence[float], fidelity: float = 1.0) -> str | None:
        """Returns a sentence once ranks have been slow for PATIENCE steps in a row, else None.

        work_s: each rank's work in a step. The ranks of a replica wait for each other inside their
        work, so that all of them are as slow as the slowest. fidelity: of pacing; a host that does
        not keep up with the chips that it emulates says nothing of them.
        """
        if min(self.predicted_s) < LEAST_S:
            return None
        if fidelity < FAITHFUL:
            self.slow_steps.clear()
            return None
        ratios = [took / least for took, least in zip(work_s, self.predicted_s, strict=True)]
        middle = statistics.median(ratios)
        said = []
        for ranks in self.replicas:
            ratio = max(ratios[rank] for rank in ranks)
            self.slow_steps[ranks] = self.slow_steps[ranks] + 1 if ratio > SLOW * middle else 0
            if self.slow_steps[ranks] == PATIENCE:
                names = " or ".join(self.labels[rank] for rank in ranks)
                said.append(f"{names} is slow: its work takes {ratio:.2f} times what is predicted")
        if not said:
            return None
        return f"{'; '.join(said)}; the median rank's {middle:.2f} times, for {PATIENCE} steps now"
