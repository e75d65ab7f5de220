"""The steps' figures in Weights & Biases, or with WANDB_MODE=offline in files for it."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import wandb

from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.trackers.tracking import TrackingError, figures, identity

PROJECT = "hyperhetero"


class WeightsAndBiases:
    """A run under WANDB_PROJECT, which goes on where it is resumed."""

    def __init__(self, output: Path, completed: int) -> None:
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=output.name,
                id=identity(output, "wandb", lambda: uuid4().hex[:8]),
                resume="allow",
                dir=output,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise TrackingError(
                f"--track wandb: {' '.join(str(error).split())}; WANDB_MODE=offline needs no server"
            ) from None

    def step(self, metrics: StepMetrics) -> None:
        self.run.log(figures(metrics), step=metrics.step)

    def close(self) -> None:
        self.run.finish()


TRACKER = WeightsAndBiases
