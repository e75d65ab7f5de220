"""Step 5: the quickstart's model trained by the GPU, the CPU and an emulated chip together."""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evidence import row

from gpu_check.part import OTHER, Found, Part
from gpu_check.processes import run, run_together

MODEL, GLOBAL_BATCH, STEPS = "quickstart", 8, 8
BAR = 1.5  # percent, of losses, as ditorch-align asks for
CPU_CHIP = """\
vendor         = "CPU"
chip_type      = "CPU"
chips_per_node = 1
tp_limit       = 1
[compute]  # what a profile replaces
launch_s       = 1e-5
efficiency     = 1.0
float32_flops  = 3e10
float64_flops  = 1.5e10
float16_flops  = 3e10
bfloat16_flops = 3e10
other_flops    = 3e10
[memory]
capacity_bytes        = 4_294_967_296
bandwidth_bytes_per_s = 1e10
[links]
intra_node_bytes_per_s = 1e10
intra_node_latency_s   = 1e-5
nics_per_node          = 1
nic_bytes_per_s        = 1e10
nic_latency_s          = 1e-5
host_bytes_per_s       = 1e10
[numerics]
neutral       = true
accumulate    = "float32"
order         = "sequential"
split_k       = 1
flush_to_zero = false
fast_exp      = false
"""


def found(part: Part, folder: Path) -> Found:
    (folder / "cpu.toml").write_text(CPU_CHIP)
    environments = {part.chip: part.environment, "cpu.toml": {"DITORCH_VENDOR": "cpu"}, OTHER: {}}
    cluster = write_cluster(folder, "gpu-check", *environments)
    profile, plan, output = (folder / name for name in ("profile.json", "plan.json", "run"))
    for chip, environment in environments.items():
        measure(cluster, MODEL, chip, profile, environment)
    ranks = ranks_of(_by_rank(cluster, environments))
    model = "--cluster", cluster, "--model", MODEL
    run_together("heteropp.cli.profile", *model, "-o", profile, environments=ranks)
    search(cluster, MODEL, profile, plan)
    run_together(
        "heteropp.cli.train", "--cluster", cluster, "--plan", plan, "--profile", profile,
        "--steps", STEPS, "--output", output,
        environments=ranks,
    )  # fmt: skip
    steps = metrics(output)
    alone = _alone(plan, folder)
    error = 100 * statistics.mean(
        abs(step["loss"] - other["loss"]) / other["loss"]
        for step, other in zip(steps, alone, strict=True)
    )
    rows = [
        row("training together: mean relative error of the losses", "%", error, bar=BAR,
            peer_name="one process of the CPU"),
        *step_rows("training together", steps),
    ]  # fmt: skip
    return Found(rows, [f"training together: {_who(plan, part)}"])


def write_cluster(folder: Path, name: str, *nodes_chips: str, chips: int = 1) -> Path:
    """Writes a cluster of a node of so many chips for each chip."""
    nodes = "".join(f'[[nodes]]\nchip = "{chip}"\nchips = {chips}\n' for chip in nodes_chips)
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\n{nodes}')
    return path


def measure(
    cluster: Path, model: Path | str, chip: str, profile: Path, environment: Mapping[str, str]
) -> None:
    """Adds a chip's times to a profile. Raises StepError."""
    run(
        "heteropp.cli.profile", "--cluster", cluster, "--model", model, "--chip", chip,
        "--tp", 1, "--no-links", "-o", profile,
        environment=environment,
    )  # fmt: skip


def search(cluster: Path, model: Path | str, profile: Path, plan: Path) -> None:
    """Plans with the exact planner, which leaves out no chip. Raises StepError."""
    run(
        "heteropp.cli.search", "--cluster", cluster, "--model", model, "--planner", "exact",
        "--global-batch", GLOBAL_BATCH, "--profile", profile, "-o", plan,
        environment={},
    )  # fmt: skip


def metrics(output: Path) -> list[dict]:
    """Returns what a run measured, by step."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def step_rows(name: str, steps: list[dict]) -> list[dict]:
    """The predicted step beside the measured one; the first step warms up."""
    counted = steps[1:]
    measured = statistics.median(step["step_s"] for step in counted)
    predicted = counted[0]["predicted_step_s"]
    fidelities = [s["pacing_fidelity"] for s in counted if s["pacing_fidelity"] is not None]
    paced = f", pacing fidelity {min(fidelities):.0%}" if fidelities else ""
    peer = f"measured, median of {len(counted)} steps{paced}"
    return [
        row(f"{name}: predicted step", "ms", 1e3 * predicted, peer=1e3 * measured, peer_name=peer),
        row(f"{name}: error of the predicted step", "%", 100 * abs(predicted / measured - 1)),
    ]


def ranks_of(environments: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns each rank's environment, with what torchrun on a node of its own would add."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free, and soon taken by rank 0
    shared = {
        "WORLD_SIZE": str(len(environments)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    return [{**own, **shared, "RANK": str(rank)} for rank, own in enumerate(environments)]


def _by_rank(
    cluster: Path, environments: Mapping[str, Mapping[str, str]]
) -> list[Mapping[str, str]]:
    """Returns the environments, which are named by chips, in the order of the cluster's ranks."""
    from heteropp.description.cluster import read_cluster

    machines = read_cluster(cluster)
    return [environments[chip] for chip in sorted(environments, key=machines.ranks_of)]


def _alone(plan: Path, folder: Path) -> list[dict]:
    """Trains the same model in one process of the CPU, without ditorch and dicomm."""
    from heteropp.description.plan import Pipeline, Replica, Stage, read_plan, write_plan

    together = read_plan(plan)
    micro_batch = together.micro_batch
    replica = Replica(ranks=(0,), chip="cpu.toml", batch_share=micro_batch)
    stage = Stage(layers=(0, together.model.layers), recompute=False, replicas=(replica,))
    pipeline = Pipeline(micro_batches=together.global_batch // micro_batch, stages=(stage,))
    alone = replace(together, pipelines=(pipeline,), profile=None, prediction=None)
    path, output = folder / "alone.json", folder / "alone"
    write_plan(alone, path)
    options = "--plan", path, "--device", "cpu", "--steps", STEPS, "--output", output
    run("heteropp.cli.train", *options, environment={})
    return metrics(output)


def _who(plan: Path, part: Part) -> str:
    """Returns the plan in a line."""
    from heteropp.description.outline import outline
    from heteropp.description.plan import read_plan

    return outline(read_plan(plan)).replace(part.chip, Path(part.chip).stem)
