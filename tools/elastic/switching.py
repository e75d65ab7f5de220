"""Switching between plans in running processes: how long no step runs, and who sends how much.

The state moves over dicomm's shared memory, on the host; the table is made within the time. Beside
our table stands one in which the first that holds a slice sends it (Hetu v2, section 7.4: a plan
without heuristics).
"""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from evidence import Row, row
from pipelines.ranks import Ranks
from rich.console import Console

from dicomm.bench.quiet import Quiet, Watch
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.models.llama.model import LlamaModel
from hyperhetero.progress import Progress

MODEL = LlamaModel(
    name="75 MiB of state",
    layers=8,
    hidden=256,
    heads=8,
    kv_heads=4,
    intermediate=704,
    vocab=1280,
    sequence_length=32,
)
DEADLINE_S = 60.0
MEMBERS = tuple(f"a-0/{i}" for i in range(6))


def plan_of(*stages: tuple[int, int, int]) -> Plan:
    """Layers, replicas and tensor-parallel degree of each stage."""
    made, layer, rank = [], 0, 0
    for layers, dp, tp in stages:
        replicas = []
        for _ in range(dp):
            ranks = tuple(range(rank, rank + tp))
            replicas.append(Replica(ranks=ranks, chip="host", batch_share=4 // dp))
            rank += tp
        span = layer, layer + layers
        made.append(Stage(layers=span, recompute=False, replicas=tuple(replicas)))
        layer += layers
    plan = Plan(
        model=MODEL,
        global_batch=8,
        micro_batch=4,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=2, stages=tuple(made)),),
    )
    validate(plan)
    return plan


# one after the other: tensor parallelism up and down, replicas, one rank less, two more
PLANS = {
    "tp 2, 2 stages": plan_of((4, 1, 2), (4, 1, 2)),
    "tp 4": plan_of((8, 1, 4)),
    "dp 2, 2 stages": plan_of((5, 2, 1), (3, 2, 1)),
    "5 ranks": plan_of((3, 2, 1), (3, 1, 2), (2, 1, 1)),
    "4 ranks, tp 2": plan_of((6, 1, 2), (2, 2, 1)),
    "6 ranks": plan_of((4, 2, 1), (2, 1, 2), (2, 2, 1)),
}


def switching_rows(rounds: int = 5) -> tuple[list[Row], Quiet]:
    """Measures switching from every plan to the next and back to the first. Raises Failed.

    Returns the median seconds of each switch, and what its busiest sender sends in MiB.
    """
    pairs = list(pairwise([*PLANS, next(iter(PLANS))]))
    samples: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    console = Console(stderr=True)
    with Ranks(len(MEMBERS), _Member) as ranks, Progress(console=console, transient=True) as bar:
        task = bar.add_task("switching", total=rounds * len(pairs))
        watch = Watch()
        ranks.call("start", pairs[0][0])
        for _ in range(rounds):
            for pair in pairs:
                seconds = [s for s in ranks.call("switch", *pair) if s is not None]
                samples[pair].append(max(seconds))
                watch.spin()
                bar.advance(task)
        quiet = watch.result()
    result = [
        row(f"switch, {old} to {new}", "s", statistics.median(seconds), bar=1.0)
        for (old, new), seconds in samples.items()
    ]
    return result + [_busiest(old, new) for old, new in pairs], quiet


def _busiest(old: str, new: str) -> Row:
    from heteropp.state.switching.switch import Switch

    switch = Switch(PLANS[old], PLANS[new], *(_members(PLANS[name]) for name in (old, new)))
    ours = switch.table().sent_bytes
    unplanned = _first_sends(switch)
    return row(
        f"switch, {old} to {new}: busiest sender",
        "MiB",
        max(ours.values()) / 2**20,
        peer=max(unplanned.values()) / 2**20,
        peer_name="the first holder sends",
    )


def _first_sends(switch: Any) -> Counter[int]:
    """Bytes by rank where whoever lacks a slice gets it from the lowest rank that has it."""
    from heteropp.layout.hspmd.routing import HeldBox, Wanted, route
    from heteropp.state.slices.holdings import holdings
    from heteropp.state.slices.quantities import quantities_of

    table = switch.table()
    itemsizes = [quantity.itemsize for quantity in quantities_of(MODEL)] * len(table.tensors)

    def boxes(kind: Any, plan: Plan) -> list[Any]:
        return [
            kind(table.tensors[h.name, h.quantity.name], rank, h.box)
            for rank in range(plan.world_size)
            for h in holdings(plan, rank, quantities_of(MODEL))
        ]

    # the lowest rank is the one with the fastest links
    routed = route(
        boxes(HeldBox, switch.old), boxes(Wanted, switch.new), itemsizes, lambda a, _: -float(a)
    )
    sent: Counter[int] = Counter()
    for transfer in (t for round_ in routed for t in round_):
        if transfer.senders != (transfer.receiver,):
            sent[transfer.senders[0]] += transfer.size_bytes
    return sent


def _members(plan: Plan) -> tuple[str, ...]:
    return MEMBERS[: plan.world_size]


class _Member:
    """A process: a rank of those plans that are large enough."""

    def __init__(self, rank: int, store: Any) -> None:
        import torch

        import dicomm.distributed  # noqa: F401  (registers the backend)
        from heteropp.runtime.measuring.metrics import HostClock
        from heteropp.runtime.ranks.device import Device
        from heteropp.runtime.ranks.host_memory import keep_freed_memory
        from heteropp.runtime.trainer import opened

        keep_freed_memory()
        self.name, self.store, self.worlds = MEMBERS[rank], store, 0
        self.device = Device(torch.device("cpu"), "dicomm", HostClock())
        self.trainer: Any = None
        opened(None)  # as a member that joins does beside the running steps
        gc.collect()
        gc.freeze()

    def start(self, name: str) -> None:
        if self.name in _members(PLANS[name]):
            self._train(PLANS[name])
            self.trainer.initialise()
            self.trainer.step()
        else:
            self.worlds += 1

    def switch(self, old: str, new: str) -> float | None:
        """Seconds from the end of a step to where the next one can begin; then takes one."""
        from heteropp.state.switching.switch import Switch, move

        switch = Switch(PLANS[old], PLANS[new], *(_members(PLANS[name]) for name in (old, new)))
        if self.name not in switch.members:
            self.worlds += 2
            return None
        begin_s = perf_counter()
        own = self._leave() if self.trainer is not None else None
        control = self._join(switch.members)
        position, buffers = move(switch, switch.table(), control, own, self.device.device)
        del own
        if buffers is None:
            self.worlds += 1
            self._disconnect()
            return None
        self._disconnect()
        self._train(switch.new)
        self.trainer.take_over(position, buffers)
        seconds = perf_counter() - begin_s
        self.trainer.step()
        return seconds

    def _leave(self) -> Any:
        from heteropp.state.slices.buffers import of_training

        own = self.trainer.position(), of_training(self.trainer.executor.update)
        self.trainer.control.barrier("left")
        self.trainer = None
        gc.collect()
        self._disconnect()
        return own

    def _train(self, plan: Plan) -> None:
        from heteropp.description.hyperparameters import Hyperparameters
        from heteropp.runtime.trainer import Trainer
        from heteropp.runtime.training_run import TrainingRun

        run = TrainingRun(
            plan=plan,
            cluster=None,
            chips=(),
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
            device="cpu",
        )
        self.trainer = Trainer(run, self.device, self._join(_members(plan)))

    def _join(self, members: tuple[str, ...]) -> Any:
        from torch.distributed import PrefixStore

        from heteropp.process_groups.control import Control
        from heteropp.runtime.ranks.transport import connect

        self.worlds += 1
        store = PrefixStore(f"world {self.worlds}", self.store)
        rank, size = members.index(self.name), len(members)
        connect(store, rank, size, "dicomm", DEADLINE_S)
        return Control(store, rank, size, DEADLINE_S)

    def _disconnect(self) -> None:
        from torch.distributed import destroy_process_group

        destroy_process_group()
