"""Chips of a cluster that train several plans, a step of one or of another as they are told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteropp.description.plan import Plan
from pipelines.ranks import DEADLINE_S


@dataclass(frozen=True)
class TrainedStep:
    """A step on one rank."""

    step_s: float
    fidelity: float  # of pacing


class TrainingRank:
    """An emulated chip, with a trainer of every plan."""

    def __init__(
        self, plans: Mapping[str, Plan], cluster: Path, p2p: str | None, rank: int, store: Any
    ) -> None:
        """`plans`: by name, each of all the cluster's chips; `p2p`: of heteropp-train."""
        from heteropp.description.cluster import read_cluster
        from heteropp.runtime.ranks.device import open_device

        os.environ.pop("DITORCH_VENDOR", None)  # an emulated chip, whatever else is there
        machines = read_cluster(cluster)
        chips = [machines.chip(each) for each in range(machines.world_size)]
        device = open_device("chip", str(chips[rank].path), chips[rank].chip_type)

        from torch.distributed import PrefixStore

        from heteropp.description.hyperparameters import Hyperparameters
        from heteropp.process_groups.control import Control
        from heteropp.runtime.ranks.transport import connect
        from heteropp.runtime.trainer import Trainer
        from heteropp.runtime.training_run import RankChip, TrainingRun

        connect(store, rank, len(chips), device.backend, DEADLINE_S, p2p)  # type: ignore[arg-type]
        self.trainers: dict[str, Trainer] = {}
        for name, plan in plans.items():
            run = TrainingRun(
                plan=plan,
                cluster=cluster,
                chips=tuple(RankChip(str(chip.path), chip.chip_type) for chip in chips),
                steps=1 << 30,
                output=Path("unused"),
                data=None,
                weights=None,
                resume=False,
                resume_from=None,
                checkpoint_every=0,
                keep=1,
                deadline_s=DEADLINE_S,
                seed=0,
                hyperparameters=Hyperparameters(),
                device="chip",
            )
            control = Control(PrefixStore(name, store), rank, len(chips), DEADLINE_S)
            self.trainers[name] = Trainer(run, device, control)
            self.trainers[name].initialise()

    def step(self, name: str) -> TrainedStep:
        trainer = self.trainers[name]
        trainer.step()
        reading = trainer.reading
        assert reading.pacing_fidelity is not None
        return TrainedStep(reading.step_s, reading.pacing_fidelity)
