"""Trains a plan from a program, as heteropp-train does from a command line."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from heteropp.api.checking import check_given
from heteropp.api.errors import InputError, TrainingError
from heteropp.api.training.options import OUTPUT, TrainingOptions
from heteropp.api.training.resume import run_to_resume
from heteropp.api.training.run import run_training
from heteropp.api.training.validation_sets import as_texts
from heteropp.description.cluster import Cluster
from heteropp.description.cluster_writer import write_cluster
from heteropp.description.plan import Plan, write_plan

PATHS = ("plan", "cluster", "data", "weights", "output", "disk")


def train(
    plan: Plan | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    *,
    output: str | Path = OUTPUT,
    **options: Any,
) -> Path:
    """Trains a plan on this machine's chips, or as the rank that torchrun started.

    cluster: the plan's; without one give device="cpu". output: the run's folder, which holds
    metrics, logs and checkpoints; it is returned. options: those of TrainingOptions, which are
    those of heteropp-train, such as steps=100, data="tokens", checkpoint_every=20; validation also
    takes paths by name, {"wiki": "wiki.tokens", "code": "code.tokens"}. With resume=True the run
    in `output` goes on; what is not given is as it began.

    Raises InputError, FileError, PlanError or HyperparameterError before anything starts, and
    TrainingError when the run ended before its last step.
    """
    known = [field.name for field in fields(TrainingOptions)]
    for name in options:
        if name not in known:
            raise InputError(f"train has no option {name}; expected one of {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="heteropp-") as folder:
        if isinstance(plan, Plan):
            content, plan = plan, Path(folder, "plan.json")
            write_plan(content, plan)  # the run keeps a copy
        if isinstance(cluster, Cluster):
            machines, cluster = cluster, Path(folder, "cluster.toml")
            write_cluster(machines, cluster)
        return _train({**options, "plan": plan, "cluster": cluster, "output": output})


def _train(given: dict[str, Any]) -> Path:
    given = {name: value for name, value in given.items() if value is not None}
    if "validation" in given:
        given["validation"] = as_texts(given["validation"])
    check_given(TrainingOptions, given)
    given = {**run_to_resume(given, OUTPUT), **given}  # what a run that goes on began with
    folder = Path(given.setdefault("output", OUTPUT))
    for name in PATHS:
        if name in given:
            given[name] = Path(given[name])
    if "bucket" in given:
        given["bucket"] = [Path(each) for each in given["bucket"]]
    code = run_training(TrainingOptions(**given), given)
    if code:
        raise TrainingError(
            f"training ended with exit code {code}; the logs of its ranks are in {folder / 'logs'}"
        )
    return folder
