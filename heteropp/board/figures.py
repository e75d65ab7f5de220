"""The figures of a line of metrics.jsonl that the page draws, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

FIGURES = (
    *("loss", "validation_loss", "gradient_norm", "learning_rate", "tokens_per_s"),
    *("tokens_per_chip_per_s", "step_s", "predicted_step_s", "utilization", "bubble"),
    *("communication", "pacing_fidelity", "waiting_cpu", "loss_scale"),
)
MOST_LINES = 16  # of one chart
OTHERS = "all other links"


class Figures:
    """Takes the figures out of lines; `memory/...` is in bytes, `link/...` in bytes a step."""

    def __init__(self) -> None:
        self.peaks = numpy.zeros(0, numpy.int64)  # bytes, by rank, in any step
        self._ranks_by_chip: dict[str, Any] = {}
        self._links: list[str] = []  # that have a line of their own

    def of_plan(self, plan: dict[str, Any] | None) -> None:
        """Takes from a plan which chip each rank has; None: it is not known."""
        self._ranks_by_chip = _ranks_by_chip(plan) if plan else {}

    def of(self, line: dict[str, Any]) -> dict[str, float | None]:
        """Returns the figures by name."""
        found: dict[str, float | None] = {name: _number(line.get(name)) for name in FIGURES}
        sets = line.get("validation_losses") or {}
        if len(sets) > 1:
            found |= {f"validation/{name}": _number(loss) for name, loss in sets.items()}
        found |= self._memory(line.get("peak_memory_bytes") or ())
        found |= self._sent(line.get("sent_bytes") or {})
        return found

    def _memory(self, by_rank: Sequence[int]) -> dict[str, float | None]:
        sizes = numpy.array(by_rank, numpy.int64)
        if len(sizes) == len(self.peaks):
            numpy.maximum(self.peaks, sizes, out=self.peaks)
        else:  # the chips have changed
            self.peaks = sizes
        if len(by_rank) <= MOST_LINES:
            return {f"memory/rank {rank}": size for rank, size in enumerate(by_rank)}
        of_plan = sum(map(len, self._ranks_by_chip.values())) == len(sizes)
        groups = self._ranks_by_chip if of_plan else {"all chips": slice(None)}
        return {
            f"memory/largest of {chip}": int(sizes[ranks].max()) for chip, ranks in groups.items()
        }

    def _sent(self, by_link: dict[str, int]) -> dict[str, float | None]:
        if len(by_link) <= MOST_LINES:
            return {f"link/{link}": size for link, size in by_link.items()}
        if not self._links:
            self._links = sorted(by_link, key=lambda link: -by_link[link])[: MOST_LINES - 1]
        found: dict[str, float | None] = {f"link/{n}": by_link.get(n, 0) for n in self._links}
        own = set(self._links)
        return found | {f"link/{OTHERS}": sum(s for n, s in by_link.items() if n not in own)}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _ranks_by_chip(plan: dict[str, Any]) -> dict[str, Any]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for pipeline in plan["pipelines"]:
        for stage in pipeline["stages"]:
            for replica in stage["replicas"]:
                chips = replica.get("group_chips") or [replica["chip"]]
                size = len(replica["ranks"]) // len(chips)
                for i, chip in enumerate(chips):
                    group = replica["ranks"][i * size : (i + 1) * size]
                    ranks[Path(chip).name.removesuffix(".toml")] += group
    return {chip: numpy.array(own) for chip, own in sorted(ranks.items())}
