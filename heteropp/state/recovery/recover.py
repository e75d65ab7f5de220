"""Gives the ranks of a fresh generation the newest state that the snapshots still make up.

Each node says what it holds and each rank what it wants; rank 0 decides, and tells every rank its
share. Where a copy turns out to be damaged, rank 0 decides again without it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Literal

from pydantic import TypeAdapter

from heteropp.process_groups.control import Control
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    Manifest,
    check_resumable,
)
from heteropp.state.recovery.assignment import ReceivedState, RecoveryShare, SourceKind, assign
from heteropp.state.recovery.bundles import Want
from heteropp.state.recovery.fetch import Readings, fetch_and_share
from heteropp.state.recovery.sources import LostError, RankSnapshot, StoredTensor, choose
from heteropp.state.recovery.tiers import Tier, Tiers
from heteropp.state.slices.scalars import Scalars
from heteropp.state.slices.state import State

READ_S = 24 * 3600.0
LIST_S = 60.0  # for the remote store to say what it has
KEPT, WANTS = "recovery/kept", "recovery/wants"  # keys


@dataclass(frozen=True)
class Recovered:
    """What a recovery did: on rank 0 for all ranks, on the others only the step and the time."""

    step: int  # completed
    seconds: float
    moved: tuple[ReceivedState, ...] = ()
    warnings: tuple[str, ...] = ()  # sentences: what was of no use, and was taken from elsewhere
    kept: tuple[RankSnapshot, ...] = ()  # what there was; see bitmap.lines

    def bytes_from(self, source: SourceKind) -> int:
        return sum(moved.bytes for moved in self.moved if moved.source == source)


@dataclass(frozen=True)
class Order:
    """What rank 0 tells a rank to do, or the error that it tells all of them."""

    kind: Literal["read", "pass on", "nothing", "lost", "unlike"]
    what: str = ""  # of an error
    nodes: tuple[str, ...] = ()  # of a LostError
    step: int = 0
    scalars: Scalars | None = None
    share: RecoveryShare | None = None


_kept = TypeAdapter(list[RankSnapshot])
_wants = TypeAdapter(list[Want])
_order = TypeAdapter(Order)


def recover(
    state: State,
    run: Manifest,
    tiers: Tiers,
    nodes: Sequence[str],
    control: Control,
    reported: int | None = None,
    saved: int = 0,
) -> Recovered | None:
    """Fills the state of all ranks, each of which calls it.

    run: what this run is, as its next manifest would say; tiers: those of this rank's node; nodes:
    their names, by rank. On rank 0, reported: the newest step that the run's metrics have, as a
    later one would leave a gap; saved: the newest one that there is a checkpoint of. The world
    group must be there.

    None where nothing was ever kept, or the checkpoint is newer than the newest whole step. Raises
    LostError where no step is whole any more, and CheckpointError where snapshots are of another
    run.
    """
    begin_s = time.monotonic()
    control = _patient(control)
    wants = sorted(state.wanted(), key=lambda want: (want[0], want[1].name, want[1].box))
    _publish(wants, tiers, nodes, control)
    decider = Decider(run, tiers, nodes, control, reported, saved) if control.rank == 0 else None
    readings = Readings(tiers)
    for attempt in itertools.count():
        if decider:
            decider.decide(attempt)
        order = _heard(control, attempt)
        if order is None:
            return None
        if order.kind == "pass on":
            break
        assert order.share is not None and order.scalars is not None
        share, step, scalars = order.share, order.step, order.scalars
        reads = share.each_read()
        damage = readings.read(reads)
        found = {reads.index(copy): why for copy, why in damage.items()}
        control.publish(f"recovery/damage {attempt}", json.dumps(found))
    fetched = fetch_and_share(share, control.rank, readings, wants)
    state.restore(fetched, scalars)
    seconds = time.monotonic() - begin_s
    return decider.recovered(seconds) if decider else Recovered(step, seconds)


def _patient(control: Control) -> Control:
    """A connection that waits for slow stores; the watch knows which rank is silent."""
    store = control.store.clone()  # type: ignore[attr-defined]
    return Control(store, control.rank, control.world_size, READ_S)


def _publish(wants: list[Want], tiers: Tiers, nodes: Sequence[str], control: Control) -> None:
    """Publishes what this rank wants and, on a node's first rank, what the node holds."""
    rank = control.rank
    kept: list[RankSnapshot] = []
    warnings: list[str] = []
    for tier in tiers.own() if nodes.index(nodes[rank]) == rank else []:
        kept += _kept_in(tier, nodes[rank], tiers.job, warnings)
    control.publish("recovery/unseen", json.dumps(warnings))
    control.publish(WANTS, _wants.dump_json(wants).decode())
    control.publish(KEPT, _kept.dump_json(kept).decode())


def _kept_in(tier: Tier, node: str, job: str, warnings: list[str]) -> list[RankSnapshot]:
    """Lists what a tier holds of the job; adds one warning where some or all cannot be read."""
    kept: list[RankSnapshot] = []
    errors: list[Exception] = []
    try:
        for found in tier.manifests(job):
            if isinstance(found, Exception):
                errors.append(found)
            else:
                kept.append(RankSnapshot(tier.kind, node, found))
    except Exception as error:  # of whatever store
        errors.append(error)
    if errors:
        why = " ".join(str(errors[0]).split()) or type(errors[0]).__name__
        part = " in part" if kept else ""
        warnings.append(f"{tier.url} ({tier.kind}) cannot be read{part}: {why}")
    return kept


def _kept_remotely(tier: Tier, job: str, warnings: list[str]) -> list[RankSnapshot]:
    """Lists what the remote store holds of the job; nothing if it does not answer in LIST_S.

    A thread asks, as a store that is gone may never answer.
    """
    answers: Queue[tuple[list[RankSnapshot], list[str]]] = Queue()

    def ask() -> None:
        said: list[str] = []
        answers.put((_kept_in(tier, "", job, said), said))

    threading.Thread(target=ask, name="list-remote", daemon=True).start()
    try:
        kept, said = answers.get(timeout=LIST_S)
    except Empty:
        kept, said = [], [f"{tier.url} ({tier.kind}) does not answer in {LIST_S:g} s"]
    warnings += said
    return kept


def _heard(control: Control, attempt: int) -> Order | None:
    """Returns this rank's order, or None where there is nothing to recover.

    Raises LostError or CheckpointError where the order is that error.
    """
    order = _order.validate_json(control.hear(f"recovery/order {attempt}/{control.rank}"))
    if order.kind == "lost":
        raise LostError(order.what, order.nodes)
    if order.kind == "unlike":
        raise CheckpointError(order.what)
    return None if order.kind == "nothing" else order


class Decider:
    """Decides, on rank 0, what every rank reads; it knows what all of them hold and want."""

    def __init__(
        self,
        run: Manifest,
        tiers: Tiers,
        nodes: Sequence[str],
        control: Control,
        reported: int | None,
        saved: int,
    ) -> None:
        self.run, self.job, self.nodes, self.control = run, tiers.job, nodes, control
        self.unasked = [tier for tier in tiers.each() if tier.kind == "remote"]
        self.reported, self.saved = reported, saved
        texts = control.collect(WANTS)  # those of replicas are alike
        read = {text: _wants.validate_json(text) for text in set(texts)}
        self.wants = [read[text] for text in texts]
        self.kept = [one for text in control.collect(KEPT) for one in _kept.validate_json(text)]
        unseen = control.collect("recovery/unseen")
        self.warnings = [warning for text in unseen for warning in json.loads(text)]
        for key in (WANTS, KEPT):  # long
            control.forget(key)
        self.damaged: set[StoredTensor] = set()
        self.shares: list[RecoveryShare] = []

    def decide(self, attempt: int) -> None:
        """Tells every rank what to do next."""
        if attempt and not self._learn(attempt - 1):
            orders = [Order("pass on")] * len(self.nodes)
        else:
            orders = self._orders()
        for rank, order in enumerate(orders):
            key = f"recovery/order {attempt}/{rank}"
            self.control.announce(key, _order.dump_json(order).decode())

    def recovered(self, seconds: float) -> Recovered:
        return Recovered(
            self.step, seconds, tuple(self.moved), tuple(self.warnings), tuple(self.kept)
        )

    def _orders(self) -> list[Order]:
        ranks = len(self.nodes)
        if not self._have_newest():
            while self.unasked:
                self.kept += _kept_remotely(self.unasked.pop(), self.job, self.warnings)
        if not self.kept:
            return [Order("nothing")] * ranks
        try:
            step, copies = choose(self.kept, self.run.model, self.damaged, self.reported)
            manifest = next(one.manifest.run for one in self.kept if one.manifest.step == step)
            check_resumable(Checkpoint(Path(step.folder), manifest), self.run)
        except LostError as error:
            return [Order("lost", str(error), error.nodes)] * ranks
        except CheckpointError as error:
            return [Order("unlike", str(error))] * ranks
        if step.step < self.saved:
            return [Order("nothing")] * ranks
        assignment = assign(copies, self.wants, self.nodes)
        self.step, self.moved = step.step, assignment.moved
        self.shares = assignment.shares(ranks)
        scalars = manifest.scalars
        return [
            Order("read", step=step.step, scalars=scalars, share=share) for share in self.shares
        ]

    def _have_newest(self) -> bool:
        """Whether the nodes themselves hold all of their newest step."""
        if self.damaged or not self.kept:
            return False
        try:
            step, _ = choose(self.kept, self.run.model, (), self.reported)
        except LostError:
            return False
        return step == max(one.manifest.step for one in self.kept)

    def _learn(self, attempt: int) -> bool:
        """Collects which copies the ranks found damaged; returns whether there were any."""
        texts = self.control.collect(f"recovery/damage {attempt}")
        found = False
        for share, text in zip(self.shares, texts, strict=True):
            for index, why in json.loads(text).items():
                copy = share.each_read()[int(index)]
                self.damaged.add(copy)
                self.warnings.append(f"{copy.where}, {why}; it is taken from elsewhere")
                found = True
        return found
