"""A pipeline of emulated chips on which F, I and W of a stage take equally long."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import twins

from heteropp.models.llama.model import LlamaModel
from heteropp.schedule.action import Action

CHIP, CLUSTER = "even.toml", "cluster.toml"
# short sequences and a small vocabulary: next to all of the time is that of weight matrices, which
# F, I and W each multiply once
LENGTH, VOCABULARY, SEQUENCES = 2, 2, 32  # SEQUENCES of a micro-batch


def even_model(layers: int) -> LlamaModel:
    return LlamaModel(
        name="even",
        layers=layers,
        hidden=64,
        heads=2,
        kv_heads=2,
        intermediate=256,
        vocab=VOCABULARY,
        sequence_length=LENGTH,
    )


def write_cluster(folder: Path, model: LlamaModel, stages: int, action_s: float) -> None:
    """Chips that take action_s for F of a stage, for I and for W; only products take any time."""
    weights = 4 * model.hidden**2 + 3 * model.hidden * model.intermediate
    products = 2 * SEQUENCES * LENGTH * weights * model.layers / stages
    chip = twins.CHIP.format(
        vendor="EVEN",
        launch_s=0.0,
        efficiency=products / action_s / 1e15,
        flops=1e15,
        capacity_bytes=1 << 30,
        bandwidth_bytes_per_s=1e15,
        intra_node_bytes_per_s=1e9,
        latency_s=0.0,
        nic_bytes_per_s=1e9,
        nic_latency_s=0.0,
        host_bytes_per_s=1e15,
        neutral="true",
    )
    (folder / CHIP).write_text(chip)
    (folder / CLUSTER).write_text(f'name = "even"\n[[nodes]]\nchip = "{CHIP}"\nchips = {stages}\n')


@dataclass(frozen=True)
class Ran:
    """A rank's step: its actions, when each began and ended, by the machine's monotonic clock."""

    actions: list[tuple[Action, float, float]]
    fidelity: float  # of pacing


class PacedRank:
    """A chip, with an executor of every plan."""

    def __init__(self, folder: Path, plans: dict[str, Any], rank: int, store: Any) -> None:
        from heteropp.runtime.ranks.device import open_device

        os.environ.pop("DITORCH_VENDOR", None)  # an emulated chip, whatever else is there
        self.device = open_device("chip", str(folder / CHIP), "EVEN-TWIN")

        from heteropp.runtime.ranks.device import set_links
        from heteropp.runtime.ranks.transport import Coordinates, Groups, connect
        from pipelines.stages import OurPipeline, modules

        connect(store, rank, next(iter(plans.values())).world_size, self.device.backend)
        self.made = {}
        for name, plan in plans.items():
            place = Coordinates.of(plan, rank)
            set_links(plan, folder / CLUSTER, Groups(place))
            held = modules(plan, place, self.device.device)
            self.made[name] = OurPipeline(plan, place, held, self.device.clock)

    def step(self, name: str) -> Ran:
        self.device.begin_step()
        result = self.made[name].step()
        seconds = self.device.clock.seconds
        actions = [(action, seconds(begin), seconds(end)) for action, begin, end in result.marks]
        fidelity = self.device.pacing_fidelity()
        assert fidelity is not None
        return Ran(actions, fidelity)
