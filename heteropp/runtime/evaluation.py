"""The loss of data that is only tried on."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from heteropp.data.batch import Batch
from heteropp.process_groups.collective import all_gather
from heteropp.runtime.passes import Passes
from heteropp.schedule.action import Action, Kind

FORWARD = (Kind.RECV_ACTIVATION, Kind.GATHER_ACTIVATION, Kind.F, Kind.SEND_ACTIVATION)


@dataclass(frozen=True)
class Validation:
    """Mean losses a token over data that is not trained on."""

    loss: float  # over the tokens of all sets
    by_name: dict[str, float]  # of each set


def evaluate(executor: Passes, batch: Batch) -> float:
    """Returns the loss of a batch between two steps; every rank calls it, and gets the same.

    Only the forward actions of a step run. They keep the step's order, so that no ranks can wait
    for each other for ever.
    """
    executor.take(batch)
    save, executor.save_activations = executor.save_activations, False
    for module in executor.modules:
        module.eval()
    executor.begin_receives(Kind.RECV_ACTIVATION)
    for action in executor.actions:
        if action.kind in FORWARD:
            _run(executor, action)
    executor.finish_sends()
    for module in executor.modules:
        module.train()
    executor.save_activations, executor.current = save, None
    losses = executor.loss.new_zeros(dist.get_world_size())
    all_gather(losses, executor.loss_contribution().view(1))
    return losses.cpu().sum().item()  # chips of unlike vendors would round it unlike


def _run(executor: Passes, action: Action) -> None:
    """Runs one action; after the last one of a forward nothing of it is kept."""
    k, i = action.ministage, action.micro_batch
    assert i is not None
    executor.current = action
    if executor.offload:
        executor.offload.load_parameters(k)
    executor.run[action.kind](k, i)
    sends = (Kind.SEND_ACTIVATION, k) in executor.outboxes
    if action.kind == (Kind.SEND_ACTIVATION if sends else Kind.F):
        del executor.work[k, i]
        micro_batch, index = divmod(i, executor.place.pipeline.slices)
        if index == executor.place.pipeline.slices - 1:
            executor.kept.pop(micro_batch, None)
