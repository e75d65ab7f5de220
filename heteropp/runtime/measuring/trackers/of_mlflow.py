"""The steps' figures in MLflow: on MLFLOW_TRACKING_URI, or in files of the run's folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.trackers.tracking import TrackingError, figures, identity

EXPERIMENT = "hyperhetero"


class MLflow:
    """A run of experiment MLFLOW_EXPERIMENT_NAME, which goes on where it is resumed."""

    def __init__(self, output: Path, completed: int) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if where is None:
            # MLflow asks for this word where a store is a folder
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = (output / "mlflow").absolute().as_uri()
        try:
            self.client = MlflowClient(where)
            self.run = identity(output, "mlflow", lambda: self._begin(output.name))
            self.client.update_run(self.run, status="RUNNING")
        except MlflowException as error:
            raise TrackingError(f"--track mlflow: {' '.join(str(error).split())}") from None

    def _begin(self, name: str) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self.client.get_experiment_by_name(experiment)
        of = found.experiment_id if found else self.client.create_experiment(experiment)
        return self.client.create_run(of, run_name=name).info.run_id

    def step(self, metrics: StepMetrics) -> None:
        now_ms = int(time.time() * 1000)
        every = [
            Metric(name, value, now_ms, metrics.step) for name, value in figures(metrics).items()
        ]
        self.client.log_batch(self.run, metrics=every)

    def close(self) -> None:
        self.client.set_terminated(self.run)


TRACKER = MLflow
