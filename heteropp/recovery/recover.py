"""Gives the ranks of a fresh generation the newest state that the copies still make up."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from heteropp.checkpoint.manifest import Checkpoint, Manifest, check_resumable
from heteropp.recovery.assignment import Assignment, Moved, SourceKind, Want, assign
from heteropp.recovery.fetch import Readings, share
from heteropp.recovery.manifest import Step
from heteropp.recovery.sources import Copy, Kept, choose
from heteropp.recovery.tiers import Tiers
from heteropp.training.ranks.control import Control
from heteropp.training.state import State

KEPT, WANTS = "recovery/kept", "recovery/wants"  # keys
_kept = TypeAdapter(list[Kept])
_wants = TypeAdapter(list[Want])


@dataclass(frozen=True)
class Recovered:
    """Alike on every rank but for the seconds."""

    step: int  # completed
    moved: list[Moved]
    warnings: list[str]  # sentences: what was of no use, and was taken from elsewhere
    kept: list[Kept]  # what there was; see bitmap.lines
    seconds: float

    def bytes_from(self, source: SourceKind) -> int:
        return sum(moved.bytes for moved in self.moved if moved.source == source)


def recover(
    state: State, run: Manifest, tiers: Tiers, nodes: Sequence[str], control: Control
) -> Recovered | None:
    """Fills the state of all ranks, each of which calls it; None where nothing was ever kept.

    run: what this run is, as its next manifest would say; tiers: those of this rank's node; nodes:
    their names, by rank. The world group must be there. Raises LostError where no step is whole
    any more, and CheckpointError where the copies are of another run.
    """
    begin_s = time.monotonic()
    kept, warnings = survey(tiers, nodes, control)
    if not kept:
        return None
    wants = _everyones_wants(state, control)
    readings = Readings(tiers)
    step, assignment = _read(kept, run, wants, nodes, readings, control, warnings)
    manifest = next(one.manifest.run for one in kept if one.manifest.step == step)
    check_resumable(Checkpoint(Path(step.folder), manifest), run)
    _forget(control)
    fetched = share(assignment, control.rank, readings, wants[control.rank])
    state.restore(fetched, manifest.scalars)
    seconds = time.monotonic() - begin_s
    return Recovered(step.step, assignment.moved, warnings, kept, seconds)


def survey(tiers: Tiers, nodes: Sequence[str], control: Control) -> tuple[list[Kept], list[str]]:
    """What all nodes hold, and sentences about what cannot be seen; the same on every rank.

    The first rank of a node speaks for it, and rank 0 for the remote store.
    """
    rank = control.rank
    own = tiers.own() if nodes.index(nodes[rank]) == rank else []
    remote = [tier for tier in tiers.each() if tier.kind == "remote" and rank == 0]
    found: list[Kept] = []
    warnings: list[str] = []
    for tier in own + remote:
        node = "" if tier.kind == "remote" else nodes[rank]
        try:
            found += [Kept(tier.kind, node, manifest) for manifest in tier.manifests(tiers.job)]
        except Exception as error:  # of whatever store
            why = " ".join(str(error).split()) or type(error).__name__
            warnings.append(f"{tier.url} ({tier.kind}) cannot be read: {why}")
    control.publish(KEPT, _kept.dump_json(found).decode())
    control.publish("recovery/unseen", json.dumps(warnings))
    texts = control.collect(KEPT)
    everything = [one for text in texts for one in _kept.validate_json(text)]
    unseen = [w for text in control.collect("recovery/unseen") for w in json.loads(text)]
    return everything, unseen


def _forget(control: Control) -> None:
    """Frees what is long; all ranks have read it when they know of each other's damage."""
    if control.rank == 0:
        for key in (KEPT, WANTS):
            control.forget(key)


def _everyones_wants(state: State, control: Control) -> list[list[Want]]:
    own = sorted(state.wanted(), key=lambda want: (want[0], want[1].name, want[1].box))
    control.publish(WANTS, _wants.dump_json(own).decode())
    return [_wants.validate_json(text) for text in control.collect(WANTS)]


def _read(
    kept: Sequence[Kept],
    run: Manifest,
    wants: Sequence[Sequence[Want]],
    nodes: Sequence[str],
    readings: Readings,
    control: Control,
    warnings: list[str],
) -> tuple[Step, Assignment]:
    """Reads what is assigned; where a copy is damaged all ranks think again, without it."""
    damaged: set[Copy] = set()
    for attempt in itertools.count():
        step, copies = choose(kept, run.model, damaged)
        assignment = assign(copies, wants, nodes)
        own = [copy for copy, rank in assignment.readers.items() if rank == control.rank]
        why = readings.read(own)
        key = f"recovery/damage {attempt}"
        control.publish(key, json.dumps({copies.index(copy): what for copy, what in why.items()}))
        found = [item for text in control.collect(key) for item in json.loads(text).items()]
        if not found:
            break
        for index, what in found:
            copy = copies[int(index)]
            damaged.add(copy)
            warnings.append(f"{copy.where}, {what}; it is taken from elsewhere")
    return step, assignment
