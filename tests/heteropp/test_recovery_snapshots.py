"""Snapshots are kept beside the training, in time, in part never believed, and not for ever."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import forkserver
import pytest
import torch
import torch.distributed as dist
from recovery_ranks import JOB, Full, Hanging, tiers_of
from torch import Tensor
from training_run import tiny_model

from heteropp.description.files import FileError
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.elastic.job import Job, Meeting
from heteropp.layout.boxes import Box
from heteropp.process_groups.control import Control
from heteropp.state.checkpoint.manifest import Manifest
from heteropp.state.recovery.fetch import Readings
from heteropp.state.recovery.manifest import RankManifest, SnapshotStep
from heteropp.state.recovery.snapshots import Cadence, SnapshotWriter
from heteropp.state.recovery.sources import StoredTensor
from heteropp.state.recovery.tiers import Tier, Tiers, check_url
from heteropp.state.slices.block_files import HeldSlice
from heteropp.state.slices.parameter_slice import ParameterSlice, Shard, block_of
from heteropp.state.slices.scalars import Scalars

ROWS, COLUMNS = 64, 256
WAIT_S = 60.0


@dataclass
class OneTensor:
    """A state of a row of two blocks, whose values are the step's number."""

    rank: int = 0
    tensors: list[Tensor] = field(default_factory=lambda: [torch.zeros(ROWS, COLUMNS)] * 2)

    def at(self, step: int) -> OneTensor:
        self.tensors = [torch.full((ROWS, COLUMNS), float(step)) for _ in range(2)]
        return self

    def held(self) -> Iterator[HeldSlice]:
        first = self.rank * ROWS
        box = Box(((first, first + ROWS), (0, COLUMNS)))
        for layer, tensor in enumerate(self.tensors):
            piece = ParameterSlice(f"layers.{layer}.mlp.up.weight", box)
            yield HeldSlice(Shard(), piece, {"value": tensor, "average": -tensor}, self.rank == 0)

    def blocks(self) -> dict[str, set[ParameterSlice]]:
        return {block_of(held.slice.name): {held.slice} for held in self.held()}


def manifest(step: int) -> Manifest:
    return Manifest(
        step=step,
        model=tiny_model(),
        global_batch=1,
        seed=0,
        tokens_sha256="",
        hyperparameters=Hyperparameters(),
        scalars=Scalars(updates=step),
    )


def writer_of(
    tiers: Tiers,
    state: OneTensor,
    cadence: Cadence,
    generation: int = 0,
    store: dist.Store | None = None,
    nodes: tuple[str, ...] = ("a-0",),
    warnings: list[str] | None = None,
) -> SnapshotWriter:
    control = Control(store or dist.HashStore(), state.rank, len(nodes), 60)
    warn = pytest.fail if warnings is None else warnings.append
    return SnapshotWriter(tiers, cadence, generation, nodes, state, control, warn)  # type: ignore[arg-type]


def steps(tier: Tier) -> list[int]:
    """Returns the steps of which the tier holds at least one rank's whole part."""
    return sorted({one.run.step for one in tier.manifests(JOB)})


def values(tiers: Tiers, tier: Tier, found: RankManifest) -> list[tuple[str, Tensor]]:
    """Every tensor of a manifest as it is read and checked."""
    copies = [
        StoredTensor(tier.kind, "a-0", found.step, file.name, part)
        for file in found.files
        for part in file.parts
    ]
    readings = Readings(tiers)
    assert readings.read(copies) == {}
    return [(copy.part.quantity, readings.values[copy]) for copy in copies]


def test_each_tier_has_the_steps_that_it_is_given(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "a-0", remote=str(tmp_path / "store"))
    state = OneTensor()
    keeping = writer_of(tiers, state, Cadence(memory=1, disk=2, remote=3))
    for step in range(1, 7):
        state.at(step)
        keeping.keep(manifest(step))
        state.tensors[0].zero_()  # the training goes on
        keeping.finish(WAIT_S)
    memory, disk, remote = tiers.each()
    assert (steps(memory), steps(disk), steps(remote)) == ([5, 6], [4, 6], [3, 6])
    for tier in (memory, disk, remote):
        for found in tier.manifests(JOB):
            expected = float(found.run.step)
            for quantity, tensor in values(tiers, tier, found):
                sign = 1 if quantity == "value" else -1
                assert torch.equal(tensor, torch.full((ROWS, COLUMNS), sign * expected))


def test_a_tier_can_be_any_url_of_fsspec(tmp_path: Path) -> None:
    tiers = Tiers(job=JOB, memory=None, disk=None, remote="memory://a-store/job")
    keeping = writer_of(tiers, OneTensor().at(3), Cadence(memory=1, remote=1))
    keeping.keep(manifest(3))
    keeping.finish(WAIT_S)
    (remote,) = tiers.each()
    (found,) = remote.manifests(JOB)
    assert len(values(tiers, remote, found)) == 4
    remote.remove(SnapshotStep(3, 0))
    assert remote.steps() == []


def test_the_remote_store_gets_what_a_rank_speaks_for_alone(tmp_path: Path) -> None:
    store, nodes = dist.HashStore(), ("a-0", "b-0")
    found = [tiers_of(tmp_path, node, remote=str(tmp_path / "store")) for node in nodes]
    cadence = Cadence(memory=1, remote=1)
    together(
        [(tiers, OneTensor(r).at(1), cadence, 0, store, nodes) for r, tiers in enumerate(found)],
        [1],
    )
    for tiers in found:
        memory, remote = tiers.own()[0], tiers.each()[-1]
        assert [len(one.files) for one in memory.manifests(JOB)] == [2]
        by_rank = {one.rank: len(one.files) for one in remote.manifests(JOB)}
        assert by_rank == {0: 2, 1: 0}


def together(arguments: list[tuple], saved: Sequence[int] = ()) -> list[SnapshotWriter]:
    """One writer a thread, as they wait for each other to begin."""
    made: dict[int, SnapshotWriter] = {}

    def run(index: int) -> None:
        made[index] = keeping = writer_of(*arguments[index])
        for step in saved:
            keeping.keep(manifest(step))
        keeping.finish(WAIT_S)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[i] for i in range(len(arguments))]


def test_what_a_slow_rank_has_not_replaced_stays(tmp_path: Path) -> None:
    """Step 1 is the newest that both have, however many the fast one has kept since."""
    store, nodes = dist.HashStore(), ("a-0", "b-0")
    tiers = [tiers_of(tmp_path, node, disk=False) for node in nodes]
    fast, slow = together(
        [(tiers[r], OneTensor(r).at(1), Cadence(memory=1), 0, store, nodes) for r in range(2)], [1]
    )
    (memory,) = tiers[0].each()
    for step in (2, 3, 4, 5):
        fast.keep(manifest(step))
        fast.finish(WAIT_S)
    assert steps(memory) == [1, 4, 5]
    slow.keep(manifest(4))
    slow.finish(WAIT_S)
    fast.keep(manifest(6))
    fast.finish(WAIT_S)
    assert steps(memory) == [1, 4, 5, 6]  # two that both have, and its own two
    slow.keep(manifest(5))
    slow.finish(WAIT_S)
    fast.keep(manifest(7))
    fast.finish(WAIT_S)
    assert steps(memory) == [4, 5, 6, 7]


def test_older_generations_go_once_this_one_has_a_step(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "a-0", disk=False)
    (memory,) = tiers.each()
    state = OneTensor().at(1)
    for generation in (0, 1):
        keeping = writer_of(tiers, state, Cadence(memory=2), generation)
        keeping.keep(manifest(1))  # is not due
        keeping.finish(WAIT_S)
        assert memory.steps() == ([SnapshotStep(4, 0)] if generation else [])
        keeping.keep(manifest(4))
        keeping.finish(WAIT_S)
        assert memory.steps() == [SnapshotStep(4, generation)]


def test_jobs_that_share_folders_leave_each_others_copies(tmp_path: Path) -> None:
    jobs = [
        Job(
            name=name,
            run=None,  # type: ignore[arg-type]  # tiers do not depend on it
            meeting=Meeting(host="", port=0, answer_s=60),
            memory=tmp_path / f"memory-{name}",
            disk=tmp_path / "disk",
            remote=f"file://{tmp_path}/store/",
        )
        for name in ("first", "second")
    ]
    for generation, job in enumerate(jobs):
        keeping = writer_of(
            job.tiers_of("a-0"), OneTensor().at(1), Cadence(memory=1, disk=1, remote=1), generation
        )
        keeping.keep(manifest(1))
        keeping.finish(WAIT_S)
    for generation, job in enumerate(jobs):
        tiers = job.tiers_of("a-0")
        for tier in tiers.each():
            (found,) = tier.manifests(job.name)
            assert found.step == SnapshotStep(1, generation)
            assert len(values(tiers, tier, found)) == 4


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    url = f"{Full.protocol}://{tmp_path / 'disk'}"
    tiers = Tiers(job=JOB, memory=tmp_path / "memory", disk=url, remote=None)
    warnings: list[str] = []
    keeping = writer_of(tiers, OneTensor().at(1), Cadence(memory=1, disk=1), warnings=warnings)
    for step in (1, 2, 3):
        keeping.keep(manifest(step))
        keeping.finish(WAIT_S)
    assert warnings == [
        f"step 1 is not kept in {url} (disk): No space left on device; training goes on"
    ]
    memory, disk = tiers.each()
    assert steps(memory) == [2, 3]
    assert steps(disk) == [] and not list((tmp_path / "disk").glob("*/*"))


def test_a_store_that_is_gone_is_said(tmp_path: Path) -> None:
    tiers = Tiers(job=JOB, memory=None, disk=None, remote=f"file:///dev/null/{tmp_path.name}")
    warnings: list[str] = []
    keeping = writer_of(tiers, OneTensor().at(1), Cadence(memory=1, remote=1), warnings=warnings)
    keeping.keep(manifest(1))
    keeping.finish(WAIT_S)
    (warning,) = warnings
    assert warning.startswith("step 1 is not kept in file:///dev/null/")
    assert "(remote): Not a directory" in warning


def test_a_store_that_hangs_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    Hanging.goes_on.clear()
    url = f"{Hanging.protocol}://{tmp_path / 'store'}"
    tiers = Tiers(job=JOB, memory=tmp_path / "memory", disk=None, remote=url)
    warnings: list[str] = []
    keeping = writer_of(tiers, OneTensor().at(1), Cadence(memory=1, remote=1), warnings=warnings)
    for step in (1, 2, 3):
        keeping.keep(manifest(step))
    keeping.finish(0.5)
    assert warnings == [
        f"step 2 is not kept in {url} (remote): the one before is still being written; "
        "training goes on",
        "the newest snapshot (remote) is not written in 0.5 s; it is left",
    ]
    memory, remote = tiers.each()
    assert steps(memory) == [2, 3]
    Hanging.goes_on.set()
    keeping.finish(WAIT_S)
    keeping.keep(manifest(4))
    keeping.finish(WAIT_S)
    assert len(warnings) == 2 and steps(remote) == [1, 4]


def test_a_store_that_is_slow_for_one_rank_gets_whole_steps_alone(tmp_path: Path) -> None:
    Hanging.goes_on.clear()
    store, nodes = dist.HashStore(), ("a-0", "b-0")
    folder, cadence = tmp_path / "store", Cadence(memory=1, remote=1)
    found = [
        tiers_of(tmp_path, node, disk=False, remote=f"{protocol}://{folder}")
        for node, protocol in zip(nodes, ("file", Hanging.protocol), strict=True)
    ]
    warnings: list[str] = []
    fast, slow = together(
        [(found[r], OneTensor(r), cadence, 0, store, nodes, warnings) for r in range(2)]
    )
    for step in (1, 2, 3, 4):
        for keeping in (fast, slow):
            keeping.keep(manifest(step))
        fast.threads["remote"].join(WAIT_S)
        if step > 1:
            Hanging.goes_on.set()
            slow.threads["remote"].join(WAIT_S)
    assert len(warnings) == 1 and warnings[0].startswith("step 2 is not kept")
    ranks = {(one.run.step, one.rank) for one in found[0].each()[-1].manifests(JOB)}
    assert ranks >= {(3, 0), (3, 1), (4, 0), (4, 1)} and not ranks & {(2, 0), (2, 1)}


def test_a_url_that_nothing_reads_is_refused() -> None:
    check_url("memory://anywhere")
    with pytest.raises(FileError, match="store nowhere://there: Protocol not known: nowhere"):
        check_url("nowhere://there")


TRIES = 200


@pytest.mark.long
def test_what_a_killed_process_leaves_is_whole_or_not_believed(tmp_path: Path) -> None:
    context = forkserver.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=kill_again_and_again, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(120)
    answer = ours.recv()
    process.join()
    assert answer == "", answer


def kill_again_and_again(root: Path, pipe) -> None:
    """Says what was wrong. The process has one thread, and may fork."""
    try:
        torn = sum(killed_once(root, generation) for generation in range(TRIES))
        pipe.send("" if torn > TRIES // 20 else f"only {torn} were killed in a save")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


def killed_once(root: Path, generation: int) -> bool:
    """Whether it was killed while it wrote."""
    tiers = tiers_of(root, "a-0", disk=False)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        state = OneTensor()
        keeping = writer_of(tiers, state, Cadence(memory=1), generation)
        for step in range(1, 100_000):
            state.at(step)
            keeping.keep(manifest(step))
            keeping.finish(WAIT_S)
            os.write(writing, step.to_bytes(4, "little"))
    os.close(writing)
    os.read(reading, 4)
    time.sleep(random.Random(generation).uniform(0, 0.01))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = os.read(reading, 1 << 20)
    os.close(reading)
    complete = max(1, int.from_bytes(said[-4:], "little"))
    (memory,) = tiers.each()
    believed = [found for found in memory.manifests(JOB) if found.generation == generation]
    for found in believed:
        read = values(tiers, memory, found)
        assert len(read) == 4, f"{len(read)} tensors of step {found.run.step}"
        for quantity, tensor in read:
            expected = found.run.step if quantity == "value" else -found.run.step
            assert (tensor == expected).all(), f"{quantity} of step {found.run.step}"
    newest = max(found.run.step for found in believed)
    assert newest >= complete, f"step {complete} was kept, and {newest} is the newest"
    folders = {step.step for step in memory.steps() if step.generation == generation}
    return max(folders) > newest  # what it had begun
