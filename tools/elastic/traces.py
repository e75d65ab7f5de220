"""Hetu's traces: a chip is lost, then the rest of its node (Hetu v2, section 7.2).

At laptop scale: C1 to C3 on two nodes of four alike chips, C4 to C7 on two nodes of two fast chips
and two of two slow ones, as fast beside each other as an H800 and an H20. Chips are killed without
notice. Ours goes on with every chip that is left, under the next plan; the peer starts again from
its last checkpoint, under the best uniform plan for the nodes that are whole. Every replica holds
all state (ZeRO 0). Checkpoints, and our remote copies, are as many steps apart; ours in host memory
are of every step, and a node's go with its last chip. Downtime is from the loss to the end of the
first step past the last one before it, less that step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from evidence import Row, row
from pipelines.ranks import Failed
from trained import TrainingError
from twins import CHIP

from dicomm.bench.quiet import Quiet, Watch
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.cluster_writer import write_cluster
from heteropp.description.plan import Plan, write_plan
from heteropp.elastic.replanning.replan import replan
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask
from heteropp.search.planner import Request

MODEL = LlamaModel(
    name="trace-twin",
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=4,
    intermediate=192,
    vocab=256,
    sequence_length=32,
)
GLOBAL_BATCH = 32
STEPS = 6  # of a phase, of which the first is not counted
EVERY = 4  # steps between checkpoints, and between our copies in the remote store
DEADLINE_S = 300.0  # for anything
STOP_S = 60.0  # for a run to save its last step
POLL_S = 0.02
SPEEDS = {"a": 989.0, "b": 148.0}  # of an H800 and an H20: TFLOP/s of bfloat16


@dataclass(frozen=True)
class Trace:
    chips: dict[str, list[int]]  # of each node, by chip type
    flops: float  # of a chip b
    configurations: tuple[str, ...]
    losses: tuple[tuple[str, ...], ...]  # chips that go, before each configuration but the first


TRACES = (
    Trace(
        {"b": [4, 4]},
        4e8,
        ("C1", "C2", "C3"),
        (("b-1/3",), ("b-1/0", "b-1/1", "b-1/2")),
    ),
    Trace(
        {"a": [2, 2], "b": [2, 2]},
        1.2e8,
        ("C4", "C5", "C6", "C7"),
        (("b-1/0", "b-1/1"), ("a-1/1",), ("a-1/0",)),
    ),
)


@dataclass(frozen=True)
class Phase:
    """One configuration, as it was run."""

    chips: int
    tokens_per_s: float
    fidelity: float
    downtime_s: float  # before it


def trace_rows(traces: Sequence[Trace] = TRACES) -> tuple[list[Row], Quiet]:
    """Runs the traces and returns their rows. Raises Failed."""
    watch, rows = Watch(), []
    with TemporaryDirectory() as folder:
        for trace in traces:
            try:
                rows += _rows(trace, Path(folder, trace.configurations[0]))
            except TrainingError as error:
                raise Failed(f"{trace.configurations[0]}: {error}") from None
            watch.spin()
    return rows, watch.result()


def _rows(trace: Trace, folder: Path) -> Iterator[Row]:
    cluster = _write(trace, folder)
    ours, peer = _ours(trace, cluster, folder), _peer(trace, cluster, folder)
    for name, own, other in zip(trace.configurations, ours, peer, strict=True):
        whole = f"a restart on whole nodes, {other.chips} chips"
        speeds = {"peer": other.tokens_per_s, "peer_name": whole, "better": "higher"}
        if name != trace.configurations[0]:
            times = {"peer": other.downtime_s, "peer_name": whole} if other.downtime_s else {}
            yield row(f"{name}: downtime before it", "s", own.downtime_s, **times)
        yield row(f"{name}: {own.chips} chips", "tokens/s", own.tokens_per_s, **speeds)
        fidelities = {"peer": other.fidelity, "peer_name": whole, "better": "higher"}
        yield row(f"{name}: pacing fidelity", "", own.fidelity, **fidelities)


def _write(trace: Trace, folder: Path) -> Cluster:
    """Chip files, cluster file and text to learn."""
    folder.mkdir()
    text = f'name = "{folder.name}"\n'
    for name, nodes in trace.chips.items():
        (folder / f"{name}.toml").write_text(
            CHIP.format(
                vendor=name.upper(),
                launch_s=1e-5,
                efficiency=1.0,
                flops=trace.flops * SPEEDS[name] / SPEEDS["b"],
                capacity_bytes=1 << 30,
                bandwidth_bytes_per_s=1e10,
                intra_node_bytes_per_s=1e9,
                latency_s=2e-5,
                nic_bytes_per_s=1e8,
                nic_latency_s=1e-4,
                host_bytes_per_s=1e9,
                neutral="true",  # all compute as the host does, which is quickest
            )
        )
        text += "".join(f'[[nodes]]\nchip = "{name}.toml"\nchips = {count}\n' for count in nodes)
    (folder / "cluster.toml").write_text(text)
    letters = random.Random(0).choices(range(97, 123), range(26, 0, -1), k=200_000)
    (folder / "text").mkdir()
    (folder / "text" / "letters.txt").write_bytes(bytes(letters))
    return read_cluster(folder / "cluster.toml")


def _request(cluster: Cluster) -> Request:
    return Request(cluster=cluster, model=MODEL, global_batch=GLOBAL_BATCH, zero_stage=0)


def _ours(trace: Trace, cluster: Cluster, folder: Path) -> list[Phase]:
    verdict = ask("exact", _request(cluster))
    if verdict.error:
        raise TrainingError(str(verdict.error))
    plan = replan(cluster, verdict.best.plan, cluster.members).plan
    phases, chips = [], cluster.world_size
    with _training(
        folder, "ours", plan, cluster, "--elastic", "--keep-disk-every=0",
        f"--remote={folder / 'remote'}", f"--keep-remote-every={EVERY}",
    ) as training:  # fmt: skip
        phases.append(training.phase(chips))
        for lost in trace.losses:
            chips -= len(lost)
            training.kill(lost)
            phases.append(training.phase(chips))
    return phases


def _peer(trace: Trace, cluster: Cluster, folder: Path) -> list[Phase]:
    """A node of which a chip is lost is lost; while no more is, training goes on."""
    phases: list[Phase] = []
    seen = Seen()
    for lost in ((), *trace.losses):
        gone = {member.split("/")[0] for member in lost} & set(cluster.node_names)
        if phases and not gone:
            phases.append(replace(phases[-1], downtime_s=0.0))
            continue
        kept = (rank for rank, name in enumerate(cluster.members) if name.split("/")[0] not in gone)
        cluster = cluster.kept(kept)
        verdict = ask("uniform", _request(cluster), simulated=1)
        if verdict.error:
            raise TrainingError(f"uniform: {verdict.error}")
        again = ("--resume",) if phases else ()
        with _training(
            folder, "peer", verdict.best.plan, cluster, f"--checkpoint-every={EVERY}", *again,
            seen=seen,
        ) as training:  # fmt: skip
            phases.append(training.phase(cluster.world_size))
            training.kill_all()
    return phases


@dataclass
class Seen:
    """What is known of a job's steps, over all its processes."""

    last: int = 0  # step
    lost_s: float | None = None  # when a chip was lost


@dataclass(frozen=True)
class Training:
    """A heteropp-train process, in a session of its own."""

    process: subprocess.Popen[bytes]
    output: Path
    said: Path  # what it printed
    seen: Seen

    def phase(self, chips: int) -> Phase:
        """Waits for STEPS steps on `chips` chips; returns median throughput and downtime."""
        first, begun_s = self.seen.last + 1, self.seen.lost_s
        past = self._await(first)
        downtime_s = time.monotonic() - begun_s - past["step_s"] if begun_s else 0.0
        self._await(first + STEPS - 1)
        steps = [step for step in self._steps() if first < step["step"] < first + STEPS]
        self.seen.last = self._steps()[-1]["step"]
        return Phase(
            chips,
            statistics.median(step["tokens_per_s"] for step in steps),
            statistics.median(step["pacing_fidelity"] for step in steps),
            downtime_s,
        )

    def kill(self, members: Sequence[str]) -> None:
        """Kills members without notice, and remembers when and after which step."""
        found = _session(self.process.pid)
        self.seen.lost_s = time.monotonic()
        for member in members:
            os.kill(found[member], signal.SIGKILL)
        self.seen.last = self._steps()[-1]["step"]

    def kill_all(self) -> None:
        self.seen.lost_s = time.monotonic()
        self._end()
        self.seen.last = max((step["step"] for step in self._steps()), default=0)

    def stop(self) -> None:
        """Ends the job by SIGTERM, so that it frees its host memory; kills what has not ended."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self._end()

    def _end(self) -> None:
        for process in _session(self.process.pid).values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def _await(self, number: int) -> dict:
        """Waits for a step and returns its metrics. Raises TrainingError."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise TrainingError(self.said.read_text().strip()[-500:])
            for step in self._steps():
                if step["step"] == number:
                    return step
            time.sleep(POLL_S)
        raise TrainingError(f"step {number} did not come in {DEADLINE_S:g} s")

    def _steps(self) -> list[dict]:
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        return [json.loads(line) for line in lines]


@contextmanager
def _training(
    folder: Path, name: str, plan: Plan, cluster: Cluster, *options: str, seen: Seen | None = None
) -> Iterator[Training]:
    given = folder / f"{name}-{cluster.world_size}"
    write_cluster(cluster, given / "cluster.toml")
    write_plan(plan, given / "plan.json")
    command = [
        *(sys.executable, "-m", "heteropp.cli.train", "--plan", given / "plan.json"),
        *("--cluster", given / "cluster.toml", "--data", folder / "text", "--steps", 10_000),
        *("--output", folder / name, "--json", *options),
    ]
    said = given / "said"
    with open(said, "w") as file:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    training = Training(process, folder / name, said, seen or Seen())
    try:
        yield training
    finally:
        training.stop()


def _session(leader: int) -> dict[str, int]:
    """The living processes of a session; members go by the names of their chips."""
    found: dict[str, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue  # it has just ended
        if int(fields.split()[3]) == leader and fields.split()[0] != "Z":
            member = name.removeprefix("heteropp-")
            found[member if "/" in member else folder.name] = int(folder.name)
    return found
