"""One pipeline over real chips and emulated ones, from the measurement to the losses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from on_opencl import ROOT, environment, lines, run
from plain_llama import train_plainly
from training_run import session, wait, write_text

from heteropp.data.source import open_tokens
from heteropp.description.plan import Plan, read_plan

CLUSTER = ROOT / "examples" / "mixed" / "cluster.toml"
STEPS, RATE, WARMUP, CLIP = 5, 2e-5, 2, 0.3
TOLERANCE = 2e-6
LIBRARIES = {"libditorch_opencl.so": "opencl", "libemuchip.so": "emuchip"}
OF_CHIP = {"opencl.toml": "opencl", "cpu.toml": "cpu", "a-mini": "emuchip", "b-mini": "emuchip"}
DEADLINE_S = 300


def chosen(**extra: str) -> dict[str, str]:
    """An environment in which each process's vendor is its chip's alone."""
    found = {name: value for name, value in environment().items() if name != "DITORCH_VENDOR"}
    return found | {"POCL_MAX_PTHREAD_COUNT": "1"} | extra


def start(folder: Path, program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"heteropp.cli.{program}", *map(str, arguments)],
        cwd=folder, env=chosen(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    code, stdout, stderr = wait(process, DEADLINE_S)
    assert code == 0, stdout + stderr
    return stdout


def vendors_by_rank(process: subprocess.Popen[str]) -> dict[int, str]:
    """The vendors whose libraries each rank loads, watched for while the run trains."""
    found: dict[int, set[str]] = {}
    while process.poll() is None:
        for number, name in session(process.pid).items():
            if rank := re.fullmatch(r"heteropp-(\d+)", name):
                try:
                    mapped = Path(f"/proc/{number}/maps").read_text()
                except OSError:
                    continue  # it has just ended
                loaded = {v for library, v in LIBRARIES.items() if library in mapped}
                found.setdefault(int(rank[1]), set()).update(loaded)
        time.sleep(0.2)
    return {rank: "+".join(sorted(loaded)) or "cpu" for rank, loaded in found.items()}


def planned(plan: Plan) -> dict[int, str]:
    return {
        rank: OF_CHIP[replica.chip]
        for stage in plan.pipelines[0].stages
        for replica in stage.replicas
        for rank in replica.ranks
    }


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * DEADLINE_S)
def test_three_vendors_train_as_one_device_does(tmp_path: Path) -> None:
    write_text(tmp_path / "text", 40_000)
    on = "--cluster", CLUSTER, "--model", "quickstart"
    measured = "--tp", 1, "--sequences", 2, "--most-layers", 2, "--no-links"
    finish(start(tmp_path, "profile", *on, *measured, "--output", "profile.json"))
    batch = "--global-batch", 8, "--micro-batch-per-replica", 2, "--profile", "profile.json"
    finish(start(tmp_path, "search", *on, *batch, "--output", "plan.json"))
    plan = read_plan(tmp_path / "plan.json")
    assert set(planned(plan).values()) == {"opencl", "cpu", "emuchip"}
    assert plan.profile is not None and plan.prediction is not None

    settings = "--learning-rate", RATE, "--warmup-steps", WARMUP, "--gradient-clip", CLIP
    training = start(
        tmp_path, "train", "--plan", "plan.json", "--cluster", CLUSTER, "--data", "text",
        "--steps", STEPS, "--output", "run", *settings,
    )  # fmt: skip
    vendors = vendors_by_rank(training)
    finish(training)
    assert vendors == planned(plan)

    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    tokens = open_tokens(tmp_path / "text", tmp_path / "cache")
    losses, *_ = train_plainly(plan.model, tokens, STEPS, 2, 4, RATE, WARMUP, CLIP)
    assert [each["loss"] for each in metrics] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.long
def test_a_machine_without_a_driver_is_told_what_to_install(tmp_path: Path) -> None:
    arguments = "--cluster", CLUSTER, "--model", "quickstart", "--chip", "opencl.toml"
    done = subprocess.run(
        [sys.executable, "-m", "heteropp.cli.profile", *arguments, "--no-links"],
        env=chosen(OCL_ICD_VENDORS=f"{tmp_path}/"), cwd=tmp_path,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = done.stderr.strip().splitlines()[-1]
    assert "chip OPENCL failed" in said and "pocl-opencl-icd" in said


OPENED = """
import torch
from heteropp.runtime.ranks.device import open_device
device = open_device("chip", "unused", "OPENCL").device
print(device, torch.ones(2, device="device").device)
"""


def test_ranks_of_a_node_have_chips_of_their_own() -> None:
    two = {"POCL_DEVICES": "basic basic"}
    found = [lines(OPENED, LOCAL_RANK=rank, **two) for rank in ("0", "1")]
    assert found == [["ocl:0 ocl:0"], ["ocl:1 ocl:1"]]
    done = run(OPENED, LOCAL_RANK="2", **two)
    assert "LOCAL_RANK is 2 and this process sees 2 chips" in done.stderr
    assert lines(OPENED, LOCAL_RANK="2", POCL_DEVICES="basic") == ["ocl:0 ocl:0"]
