"""The snapshots of the state that a generation keeps, and begins from (heteropp.state.recovery)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from heteropp.description.files import FileError, write_text
from heteropp.elastic.job import Generation, Job
from heteropp.elastic.messages import Account, MovedState, node_of
from heteropp.process_groups.control import Control
from heteropp.runtime.measuring.metrics import METRICS, newest_step
from heteropp.runtime.trainer import Trainer
from heteropp.state.checkpoint.manifest import steps
from heteropp.state.recovery import bitmap
from heteropp.state.recovery.recover import recover
from heteropp.state.recovery.snapshots import Cadence, SnapshotWriter

Say = Callable[[str], None]
HELD = "copies.txt"  # of a recovery: which node held what of each layer


def make_snapshot_writer(
    job: Job, generation: Generation, trainer: Trainer, control: Control, warn: Say
) -> SnapshotWriter:
    """Makes a rank's writer; all ranks must make theirs. `control`: for it alone."""
    cadence = Cadence(
        memory=job.keep_memory_every, disk=job.keep_disk_every, remote=job.keep_remote_every
    )
    nodes = _nodes(generation)
    tiers = job.tiers_of(nodes[control.rank])
    return SnapshotWriter(tiers, cadence, generation.number, nodes, trainer.state, control, warn)


def recovered(job: Job, generation: Generation, trainer: Trainer, warn: Say) -> Account | None:
    """Takes the newest state there is a snapshot of; None without one, or with a newer checkpoint.

    Raises LostError where no step is whole, and CheckpointError.
    """
    nodes, control = _nodes(generation), trainer.control
    tiers = job.tiers_of(nodes[control.rank])
    reported = newest_step(job.run.output / METRICS)
    saved = max((step for step, _ in steps(job.run.checkpoints)), default=0)
    found = recover(trainer.state, trainer.manifest(), tiers, nodes, control, reported, saved)
    if found is None:
        return None
    trainer.completed = found.step
    if control.rank == 0:
        for warning in found.warnings:
            warn(warning)
        text = "".join(line + "\n" for line in bitmap.lines(found.kept, trainer.run.plan.model))
        try:
            write_text(generation.folder / HELD, text)
        except FileError as error:
            warn(str(error))
    total: Counter[tuple] = Counter()
    for moved in found.moved:
        total[moved.to, moved.source, moved.origin or job.remote] += moved.bytes
    account = (
        MovedState(to=to, source=source, origin=origin, bytes=size_bytes)
        for (to, source, origin), size_bytes in sorted(total.items())
    )
    return Account(step=found.step, moved=tuple(account), seconds=found.seconds)


def _nodes(generation: Generation) -> list[str]:
    """Returns the node of each rank."""
    return [node_of(member) for member in generation.members]
