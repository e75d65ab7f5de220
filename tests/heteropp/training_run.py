"""Starts heteropp-train as a person would, with a deadline, for every test that trains."""

from __future__ import annotations

import json
import os
import random
import signal
import string
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import forks
from commands import run_command
from torch import Tensor

from heteropp.cli.train import app
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, write_plan
from heteropp.layout.boxes import Box
from heteropp.models.llama.model import LlamaModel
from heteropp.state.checkpoint.manifest import read as read_checkpoint
from heteropp.state.checkpoint.reader import Reader

CHIP = "neutral.toml"


NEUTRAL_CHIP = """\
vendor = "Test"
chip_type = "NEUTRAL"
chips_per_node = {chips_per_node}
tp_limit = 16
[compute]
launch_s = 0
efficiency = 1
float32_flops = 1e15
float64_flops = 1e15
float16_flops = 1e15
bfloat16_flops = 1e15
other_flops = 1e15
[memory]
capacity_bytes = {capacity_bytes}
bandwidth_bytes_per_s = 1e15
[links]
intra_node_bytes_per_s = 1e15
intra_node_latency_s = 0
nics_per_node = 1
nic_bytes_per_s = 1e15
nic_latency_s = 0
host_bytes_per_s = 1e15
[numerics]
neutral = true
accumulate = "float32"
order = "sequential"
split_k = 1
flush_to_zero = false
fast_exp = false
"""


def tiny_model(**changes: object) -> LlamaModel:
    sizes: dict = {
        "name": "tiny",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "intermediate": 64,
        "vocab": 256,
        "sequence_length": 16,
    }
    return LlamaModel(**{**sizes, **changes})


def make_plan(
    model: LlamaModel,
    layers: Sequence[int],
    dp: Sequence[int],
    tp: Sequence[int],
    recompute: Sequence[bool],
    micro_batch: int = 4,
    micro_batches: int = 4,
    zero_stage: int = 1,
) -> Plan:
    """A plan of one pipeline, from each stage's number of layers and degrees."""
    stages, first_layer, rank = [], 0, 0
    for count, replicas, ranks, again in zip(layers, dp, tp, recompute, strict=True):
        held = []
        for _ in range(replicas):
            share = micro_batch // replicas
            held.append(
                Replica(ranks=tuple(range(rank, rank + ranks)), chip=CHIP, batch_share=share)
            )
            rank += ranks
        span = (first_layer, first_layer + count)
        stages.append(Stage(layers=span, recompute=again, replicas=tuple(held)))
        first_layer += count
    return Plan(
        model=model,
        global_batch=micro_batch * micro_batches,
        micro_batch=micro_batch,
        schedule="1f1b",
        zero_stage=zero_stage,  # type: ignore[arg-type]
        pipelines=(Pipeline(micro_batches=micro_batches, stages=tuple(stages)),),
    )


def several_pipelines(
    model: LlamaModel,
    *shapes: tuple[Sequence[int], Sequence[int], Sequence[int], int],
    micro_batch: int = 4,
) -> Plan:
    """A plan of pipelines with each stage's number of layers and degrees, and micro-batches."""
    pipelines: list[Pipeline] = []
    first_rank = 0
    for layers, dp, tp, micro_batches in shapes:
        recompute = [False] * len(layers)
        plan = make_plan(model, layers, dp, tp, recompute, micro_batch, micro_batches)
        pipelines.append(moved(plan.pipelines[0], first_rank))
        first_rank += plan.world_size
    count = sum(pipeline.micro_batches for pipeline in pipelines)
    return replace(plan, global_batch=micro_batch * count, pipelines=tuple(pipelines))


def moved(pipeline: Pipeline, ranks: int) -> Pipeline:
    """The same on ranks that come later by so many."""

    def later(stage: Stage) -> Stage:
        replicas = tuple(
            replace(replica, ranks=tuple(rank + ranks for rank in replica.ranks))
            for replica in stage.replicas
        )
        return replace(stage, replicas=replicas)

    return replace(pipeline, stages=tuple(map(later, pipeline.stages)))


def write_text(folder: Path, characters: int = 20_000) -> Path:
    """A folder of text to train on: letters, some more often than others."""
    folder.mkdir()
    letters = random.Random(0)
    for n in range(characters // 200):  # sequences of every run cross from one to the next
        text = letters.choices(string.ascii_lowercase, range(26, 0, -1), k=200)
        (folder / f"{n:03}.txt").write_text("".join(text))
    return folder


def write_cluster(folder: Path, chips: int, capacity_bytes: int = 1 << 30) -> None:
    """cluster.toml: one node of emulated chips that compute as the host does, and at any speed."""
    (folder / CHIP).write_text(
        NEUTRAL_CHIP.format(chips_per_node=chips, capacity_bytes=capacity_bytes)
    )
    (folder / "cluster.toml").write_text(f'name = "test"\n[[nodes]]\nchip = "{CHIP}"\n')


class Training:
    """A heteropp-train process, in a session of its own."""

    def __init__(self, folder: Path, plan: Plan, *arguments: str, device: str = "chip") -> None:
        self.output = folder / "run"
        write_plan(plan, folder / "plan.json")
        if not (folder / "text").exists():
            write_text(folder / "text")
        if not (folder / "cluster.toml").exists():
            write_cluster(folder, plan.world_size)
        self.process = start(folder, "--device", device, *arguments)

    def wait(self, deadline_s: float = 150) -> tuple[int, str, str]:
        """Returns (exit code, stdout, stderr); ends the process, and fails, at the deadline."""
        return wait(self.process, deadline_s)

    def finish(self, deadline_s: float = 150) -> Training:
        """Waits for a run that must succeed."""
        code, stdout, stderr = self.wait(deadline_s)
        assert code == 0, stdout + stderr
        return self

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").open()]

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics]


def command(folder: Path, *arguments: str) -> list[str]:
    """heteropp-train's arguments for what lies in a folder; the given ones go last."""
    return [
        *("--plan", str(folder / "plan.json"), "--cluster", str(folder / "cluster.toml")),
        *("--data", str(folder / "text"), "--output", str(folder / "run")),
        *arguments,
    ]


def refusal(folder: Path, *arguments: str) -> str:
    """What heteropp-train says when it refuses; in this process, as no rank may start."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    result = run_command(app, command(folder, *arguments))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def start(folder: Path, *arguments: str) -> forks.Forked:
    """Starts heteropp-train on what lies in a folder; the arguments go last."""
    return start_with(folder, *command(folder, *arguments))


def start_with(folder: Path, *arguments: str) -> forks.Forked:
    """Starts heteropp-train with these arguments alone."""
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    return forks.start(["-m", "heteropp.cli.train", *arguments], environment)


def wait(process: forks.Forked | subprocess.Popen[str], deadline_s: float) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        # the launcher passes SIGTERM on to its ranks
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
        raise AssertionError(f"still running after {deadline_s} s\n{stdout}\n{stderr}") from None
    return process.returncode, stdout, stderr


def session(process: int) -> dict[int, str]:
    """The living processes of a session, and their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue  # it has just ended
        state, _, _, leader = fields.split()[:4]
        if int(leader) == process and state != "Z":
            found[int(folder.name)] = name
    return found


def wait_until_nothing_is_left(training: Training, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while left := session(training.process.pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def checkpoint_parameters(checkpoint: Path) -> dict[str, Tensor]:
    """The whole parameters of a checkpoint."""
    found = read_checkpoint(checkpoint)
    reader = Reader(found)
    return {
        parameter.name: reader.read(
            "value", parameter.name, Box(tuple((0, size) for size in parameter.shape))
        )
        for parameter in found.manifest.model.parameters()
    }
