"""The steps' metrics as TensorBoard shows them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from heteropp.runtime.measuring.metrics import StepMetrics


class TensorBoard:
    """Event files in a folder; what an earlier run wrote there of later steps is not shown."""

    def __init__(self, folder: Path, completed: int) -> None:
        self.writer = SummaryWriter(str(folder), purge_step=completed + 1)

    def step(self, metrics: StepMetrics) -> None:
        """Writes every figure under its name in metrics.jsonl; of the ranks' memory the largest."""
        figures = asdict(metrics)
        step = figures.pop("step")
        for name, loss in figures.pop("validation_losses").items():
            figures[f"validation_loss/{name}"] = loss
        figures["peak_memory_bytes"] = max(metrics.peak_memory_bytes)
        for name, value in figures.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
