"""Keeps snapshots of the state while the training goes on.

A step's state is copied to host memory, from where threads write it. Each tier has a thread of its
own, so that a slow store does not hold up the nearer ones. Where a snapshot cannot be written, or
not on all ranks before the next is due, a sentence says so and the training goes on, as an older
snapshot is there.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heteropp.process_groups.control import Control
from heteropp.state.checkpoint.manifest import Manifest
from heteropp.state.recovery.manifest import (
    RankManifest,
    SnapshotFile,
    SnapshotStep,
    SnapshotTensor,
    TierKind,
)
from heteropp.state.recovery.tiers import Tier, Tiers
from heteropp.state.slices.block_files import BlockFile, HeldSlice, block_files
from heteropp.state.slices.hashes import checksum
from heteropp.state.slices.parameter_slice import block_of
from heteropp.state.slices.state import State

KEPT_STEPS = 2  # complete ones, in each tier


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The number of steps from one snapshot of a tier to the next; 0 means that it gets none."""

    memory: int = 1
    disk: int = 0
    remote: int = 0

    def is_due(self, kind: TierKind, step: int) -> bool:
        every = self.every(kind)
        return bool(every) and step % every == 0

    def every(self, kind: TierKind) -> int:
        return {"memory": self.memory, "disk": self.disk, "remote": self.remote}[kind]


class SnapshotWriter:
    """Writes the snapshots of one rank; every rank of a generation has a writer."""

    def __init__(
        self,
        tiers: Tiers,
        cadence: Cadence,
        generation: int,
        nodes: Sequence[str],
        state: State,
        control: Control,
        warn: Callable[[str], None],
    ) -> None:
        """generation: a number that no other one of the job has; nodes: their names, by rank.

        `control`: a connection for the snapshots alone; the threads use it and call `warn`, too.
        """
        self.tiers = [tier for tier in tiers.each() if getattr(cadence, tier.kind)]
        self.job, self.cadence, self.generation = tiers.job, cadence, generation
        self.state, self.control, self.warn = state, control, warn
        self.leads_node = nodes.index(nodes[control.rank]) == control.rank
        self.kept: dict[TierKind, list[int]] = {tier.kind: [] for tier in self.tiers}
        self.failing: set[TierKind] = set()
        self.slow: set[TierKind] = set()
        self.begun: dict[TierKind, int] = {}  # the step that all ranks keep, or kept last
        self.threads: dict[TierKind, threading.Thread] = {}
        for tier in self.tiers:
            self._publish(tier)
            self._is_done(tier, 0)
        self.holders, self.blocks = self._agree(nodes)

    def keep(self, manifest: Manifest, first: bool = False) -> None:
        """Copies the state of this step for the tiers that are due; threads write it to them.

        Every rank calls it after each step. It waits while the memory tier still writes an older
        step. Where a rank still writes an older one to another tier, all ranks skip this step in
        that tier. first: the memory tier has no step of this generation yet, and gets this one
        whatever the cadence.
        """
        due = [tier for tier in self.tiers if self._takes(tier, manifest.step, first)]
        held = [
            one.copy() for one in self.state.held() if any(self._is_for(tier, one) for tier in due)
        ]
        for tier in due:
            content = [one for one in held if self._is_for(tier, one)]
            thread = threading.Thread(
                target=self._keep,
                args=(tier, manifest, content),
                name=f"keep-{tier.kind}",
                daemon=True,
            )
            self.threads[tier.kind] = thread
            thread.start()

    def finish(self, deadline_s: float) -> None:
        """Waits until all snapshots under way are kept or have failed, at most `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        for kind, thread in self.threads.items():
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                self.warn(
                    f"the newest snapshot ({kind}) is not written in {deadline_s:g} s; it is left"
                )

    def release(self) -> None:
        """Lets go of the state: no step follows, while the threads go on with their copies."""
        del self.state

    def _is_for(self, tier: Tier, held: HeldSlice) -> bool:
        """Whether this rank writes a slice to a tier.

        The remote store gets each element once, and a node's own tiers get what the node holds.
        """
        if tier.kind == "remote":
            return held.owned
        return block_of(held.slice.name) in self.blocks

    def _takes(self, tier: Tier, step: int, first: bool) -> bool:
        due = self.cadence.is_due(tier.kind, step)
        if tier.kind != "memory":
            return due and self._all_are_free(tier, step)
        if (due or first) and (thread := self.threads.get(tier.kind)):
            thread.join()  # only the memory, this host's, is waited for
        return due or first

    def _all_are_free(self, tier: Tier, step: int) -> bool:
        """Whether every rank has finished its last snapshot; one that some lack is of no use."""
        key, before = f"keeping/{tier.kind}", self.begun.get(tier.kind, 0)
        if self.control.rank == 0:
            free = set(self.control.collect(f"done/{tier.kind}")) == {str(before)}
            self.control.announce(f"{key}/{step}", str(int(free)))
            self.control.retract(f"{key}/{step - self.cadence.every(tier.kind)}")
            if not free and tier.kind not in self.slow:
                self.slow.add(tier.kind)
                self.warn(
                    f"step {step} is not kept in {tier.url} ({tier.kind}): "
                    "the one before is still being written; training goes on"
                )
        free = self.control.hear(f"{key}/{step}") == "1"
        if free:
            self.begun[tier.kind] = step
        return free

    def _is_done(self, tier: Tier, step: int) -> None:
        """Tells rank 0 that this rank has finished with a step, kept or not: the next may begin.

        The memory tier needs no such word, as each rank waits for its own.
        """
        if tier.kind != "memory":
            self.control.publish(f"done/{tier.kind}", str(step))

    def _keep(self, tier: Tier, manifest: Manifest, held: list[HeldSlice]) -> None:
        step = SnapshotStep(manifest.step, self.generation)
        try:
            files = tuple(self._write(tier, step, block) for block in block_files(held))
            tier.write_manifest(
                RankManifest(
                    job=self.job,
                    generation=self.generation,
                    rank=self.control.rank,
                    run=manifest,
                    holders=self.holders,
                    files=files,
                )
            )
            self.kept[tier.kind].append(manifest.step)
            self.failing.discard(tier.kind)
        except Exception as error:  # of whatever store; nobody waits for the thread
            _quietly(self._say, tier, step, error)  # where the disk is full, the log may be, too
            _quietly(tier.remove_rank, step, self.control.rank)
        _quietly(self._retire, tier)
        _quietly(self._is_done, tier, manifest.step)

    def _write(self, tier: Tier, step: SnapshotStep, block: BlockFile) -> SnapshotFile:
        """Writes a block's file; the entry that it returns says where each tensor lies in it."""
        name = f"{block.block}.{block.shard.suffix}.rank-{self.control.rank:05d}.safetensors"
        content = block.content()
        parts = tuple(
            SnapshotTensor(**vars(one), crc32=checksum(memoryview(content)[one.begin : one.end]))
            for one in block.tensors_in(content)
        )
        tier.write(step, name, content)
        return SnapshotFile(name, block.block, block.shard, len(content), parts)

    def _say(self, tier: Tier, step: SnapshotStep, error: Exception) -> None:
        if tier.kind in self.failing:
            return  # it was said
        self.failing.add(tier.kind)
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.warn(
            f"step {step.step} is not kept in {tier.url} ({tier.kind}): "
            f"{' '.join(why.split()) or type(error).__name__}; training goes on"
        )

    # ------------------------------------------------------------ what may go

    def _retire(self, tier: Tier) -> None:
        """Removes this rank's old steps: all but its newest two and the newest two of all ranks.

        Steps of other generations are removed once all ranks have kept a step of this one.
        """
        self._publish(tier)
        by_rank = [set(json.loads(text)) for text in self.control.collect(f"kept/{tier.kind}")]
        complete = sorted(set.intersection(*by_rank))
        kept = self.kept[tier.kind]
        for step in [s for s in kept if s not in kept[-KEPT_STEPS:] + complete[-KEPT_STEPS:]]:
            tier.remove_rank(SnapshotStep(step, self.generation), self.control.rank)
            kept.remove(step)
        cleans = self.control.rank == 0 if tier.kind == "remote" else self.leads_node
        if complete and cleans:
            for old in tier.steps():
                if old.generation != self.generation:
                    tier.remove(old)

    def _publish(self, tier: Tier) -> None:
        self.control.publish(f"kept/{tier.kind}", json.dumps(self.kept[tier.kind]))

    def _agree(self, nodes: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], set[str]]:
        """Returns the nodes that hold some of each block, and the blocks that this rank keeps.

        Of the ranks of a node that hold the same slices of a block, one keeps it; they take turns
        from block to block. Waits for all ranks.
        """
        digests = {
            block: checksum(repr(sorted(slices, key=lambda s: (s.name, s.box))).encode())
            for block, slices in self.state.blocks().items()
        }
        self.control.publish("holds", json.dumps(digests))
        alike: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for rank, text in enumerate(self.control.collect("holds")):
            for block, digest in json.loads(text).items():
                alike[nodes[rank], block, digest].append(rank)
        holders: dict[str, set[str]] = defaultdict(set)
        own = set()
        for turn, ((node, block, _), ranks) in enumerate(sorted(alike.items())):
            holders[block].add(node)
            if ranks[turn % len(ranks)] == self.control.rank:
                own.add(block)
        return {block: tuple(sorted(names)) for block, names in holders.items()}, own


def _quietly(act: Callable[..., None], *arguments: object) -> None:
    """Calls `act` and ignores a failure: it only costs storage, and the next step tries again."""
    try:
        act(*arguments)
    except Exception:
        return
