"""The steps' figures as TensorBoard shows them."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.trackers.tracking import figures


class TensorBoard:
    """Event files in a folder; what an earlier run wrote there of later steps is not shown."""

    def __init__(self, output: Path, completed: int) -> None:
        self.writer = SummaryWriter(str(output / "tensorboard"), purge_step=completed + 1)

    def step(self, metrics: StepMetrics) -> None:
        """Writes every figure; of the ranks' memory the largest."""
        for name, value in figures(metrics).items():
            self.writer.add_scalar(name, value, metrics.step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


TRACKER = TensorBoard
