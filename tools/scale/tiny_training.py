"""A training of as many ranks as are wanted, whose chips take next to no time."""

from __future__ import annotations

import random
import string
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trained import Training, TrainingError, start_process
from twins import Scale, write_twin

from heteropp.description.plan import Pipeline, Plan, Replica, Stage, write_plan
from heteropp.models.llama.model import LlamaModel
from scale.sizes import MACHINE_RANKS

TP, STAGES = 2, 2  # of the plan; all else is data parallel
MICRO_BATCHES = 2
ENDLESS = 1_000_000  # steps
CHIP = "a"
AS_IN_THE_PAPER = Scale(computing=1, memory=64, memory_bandwidth=1, links=1, nics=1)
DEADLINE_S = 600.0
POLL_S = 0.02


def start(folder: Path, ranks: int, port_file: Path, ports: Sequence[int]) -> Training:
    """Starts heteropp-train with so many ranks, a multiple of MACHINE_RANKS, until it is stopped.

    ports: of a relay before the store, by rank; port_file: where the store's is written.
    """
    nodes = [MACHINE_RANKS] * (ranks // MACHINE_RANKS)
    cluster = write_twin(folder / "cluster", {CHIP: nodes}, AS_IN_THE_PAPER)
    write_plan(_plan_of(ranks), folder / "plan.json")
    (folder / "text").mkdir()
    letters = random.Random(0).choices(string.ascii_lowercase, k=1000 * ranks)
    (folder / "text" / "letters.txt").write_text("".join(letters))
    words = [
        *(sys.executable, "-c", "from scale.counted_training import main; main()"),
        *(port_file, ",".join(map(str, ports))),
        *("--plan", folder / "plan.json", "--cluster", cluster, "--data", folder / "text"),
        *("--output", folder / "run", "--steps", ENDLESS, "--json"),
    ]
    return start_process(words, folder, XDG_CACHE_HOME=str(folder / "cache"))


def wait_for_steps(training: Training, steps: int) -> int:
    """Waits until so many have been trained; returns how many have. Raises TrainingError."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        with suppress(FileNotFoundError):
            found = (training.folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
            if found >= steps:
                return found
        if training.process.poll() is not None:
            training.finish()
            raise TrainingError(f"it ended before step {steps}")
        if time.monotonic() > until_s:
            raise TrainingError(f"no step {steps} within {DEADLINE_S:g} s")
        time.sleep(POLL_S)


def _plan_of(ranks: int) -> Plan:
    stage_ranks, replicas = ranks // STAGES, ranks // (TP * STAGES)
    model = LlamaModel(
        name="tiny",
        layers=STAGES,
        hidden=32,
        heads=4,
        kv_heads=2,
        intermediate=64,
        vocab=256,
        sequence_length=16,
    )
    stages = []
    for stage in range(STAGES):
        first = range(stage * stage_ranks, (stage + 1) * stage_ranks, TP)
        groups = [tuple(range(rank, rank + TP)) for rank in first]
        held = tuple(Replica(ranks=group, chip=f"{CHIP}.toml", batch_share=1) for group in groups)
        stages.append(Stage(layers=(stage, stage + 1), recompute=False, replicas=held))
    return Plan(
        model=model,
        global_batch=replicas * MICRO_BATCHES,
        micro_batch=replicas,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=MICRO_BATCHES, stages=tuple(stages)),),
    )
