"""What srun and mpirun say to a process, and what it makes of it before it trains."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training_run import CHIP, NEUTRAL_CHIP, make_plan, tiny_model, write_text

from heteropp.description.plan import write_plan
from heteropp.runtime.ranks.launchers import LauncherError, first_of

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[1-3]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "gpu2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "7",
}


def train(
    folder: Path, names: str, *arguments: str, **launcher: str
) -> subprocess.CompletedProcess[str]:
    """Starts one process as a launcher would; names: of the cluster's nodes, of which two work."""
    nodes = [
        f'[[nodes]]\n{name and f"name = {name!r}"}\nchip = "{CHIP}"\n' for name in names.split(",")
    ]
    (folder / CHIP).write_text(NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=1 << 30))
    (folder / "cluster.toml").write_text('name = "test"\n' + "".join(nodes))
    plan = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False))
    if names.startswith("gpu1,"):
        plan = replace(plan, members=("gpu1/0", "gpu3/0"))
    write_plan(plan, folder / "plan.json")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "PMIX"))}
    return subprocess.run(
        [
            *(sys.executable, "-m", "heteropp.cli.train", "--plan", "plan.json"),
            *("--cluster", "cluster.toml", "--data", str(folder / "text"), *arguments),
        ],
        cwd=folder, env=inherited | launcher, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_chip_that_the_plan_leaves_idle_ends_at_once(tmp_path: Path) -> None:
    ended = train(tmp_path, "gpu1,gpu2,gpu3", **SLURM)
    assert (ended.returncode, ended.stderr) == (0, "chip gpu2/0 is idle under this plan\n")
    ended = train(tmp_path, "gpu1,gpu2,gpu3", **(SLURM | {"SLURMD_NODENAME": "gpu2.our.net"}))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("names", "launcher", "said"),
    [
        ("gpu1,gpu2,gpu3", SLURM | {"SLURM_PROCID": ""}, "SLURM_PROCID is missing; expected"),
        ("gpu1,gpu2,gpu3", SLURM | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID is 'x'; expected"),
        (
            "gpu1,gpu2,gpu3",
            SLURM | {"SLURMD_NODENAME": "npu1"},
            "node npu1 is not in cluster test; expected one of gpu1, gpu2, gpu3",
        ),
        (
            "gpu1,gpu2,gpu3",
            SLURM | {"SLURM_STEP_NUM_TASKS": "4"},
            "cluster test has 3 chips, and 4 processes were started; expected one for each chip",
        ),
        (
            "gpu1,gpu2,gpu3",
            SLURM | {"SLURM_LOCALID": "1"},
            "2 or more processes were started on node gpu2, which has 1 in cluster test",
        ),
        ("gpu1,,gpu3", SLURM, "cluster.toml: nodes of "),
        (",", SLURM | {"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'; expected from 1 to 65535"),
        (",", OPEN_MPI, "MASTER_ADDR is missing: mpirun does not say which node has the first"),
        (",", SLURM | {"SLURM_STEP_NODELIST": "["}, "the list of nodes is '['; expected names"),
    ],
    ids=[
        *("missing", "no-number", "node", "too-many", "two-on-one"),
        *("unnamed", "port", "first", "list"),
    ],
)
def test_what_is_unlike_or_incomplete_is_one_sentence(
    tmp_path: Path, names: str, launcher: dict[str, str], said: str
) -> None:
    ended = train(tmp_path, names, **launcher)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith(said)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = train(tmp_path, ",", MASTER_PORT=port, **(SLURM | {"SLURM_PROCID": "0"}))
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == (
        f"port {port} cannot be the job's store's: Address already in use; "
        "MASTER_PORT may name another\n"
    )


def test_an_elastic_job_needs_torchrun(tmp_path: Path) -> None:
    ended = train(tmp_path, "gpu1,gpu2,gpu3", "--elastic", **SLURM)
    assert ended.returncode == 2 and ended.stderr.startswith("--elastic needs torchrun")


@pytest.mark.exhaustive
def test_a_single_task_has_the_machine_for_itself(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    ended = train(tmp_path, ",", "--steps", "1", **(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}))
    assert ended.returncode == 0, ended.stderr  # it started both ranks of the plan
    assert (tmp_path / "runs" / "train" / "metrics.jsonl").is_file()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu3", "gpu1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        ("a-[2].b,c", "a-2.b"),
    ],
)
def test_the_first_of_a_list_of_slurm_s(nodes: str, first: str) -> None:
    assert first_of(nodes) == first


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(LauncherError, match="expected names"):
        first_of("")
