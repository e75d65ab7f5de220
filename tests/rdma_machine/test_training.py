"""A job over two machines, each a kernel of its own with two RDMA rails: it trains as on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_job import losses_of
from training_run import CHIP, NEUTRAL_CHIP, command, make_plan, start, tiny_model, wait, write_text

from heteropp.description.plan import write_plan

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "tools" / "rdma-machine"
MACHINES = 2
STEPS = ("--steps", "5")
SETTINGS = (
    "DICOMM_TRANSPORT=verbs DICOMM_NICS=rxe0,rxe1 OMP_NUM_THREADS=1 XDG_CACHE_HOME=/tmp/cache"
)
# Machines wait for this host's processors: 0.5 s without an answer, seven times, is no failed rail.
PATIENCE = "DICOMM_QP_TIMEOUT=17"


@pytest.mark.timeout(700)
def test_a_job_over_rdma_computes_what_it_does_on_one_machine(tmp_path: Path) -> None:
    plan = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False))
    write_plan(plan, tmp_path / "plan.json")
    (tmp_path / CHIP).write_text(NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=1 << 30))
    nodes = f'[[nodes]]\nchip = "{CHIP}"\nchips = 1\n' * MACHINES
    (tmp_path / "cluster.toml").write_text(f'name = "test"\n{nodes}')
    write_text(tmp_path / "text")
    line = (
        f"{SETTINGS} {PATIENCE} {sys.executable} -m torch.distributed.run --nnodes {MACHINES} "
        "--node-rank $HYPERHETERO_MACHINE --nproc-per-node 1 --master-addr machine-0 "
        f"-m heteropp.cli.train {' '.join(command(Path('/share'), *STEPS))} && "
        "cat /sys/class/infiniband/rxe[01]/ports/1/hw_counters/sent_pkts"
    )
    done = subprocess.run(
        [MACHINE, "--machines", str(MACHINES), "--delay", "1ms", "bash", "-c", line],
        env=os.environ | {"RDMA_MACHINE_SHARE": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done
    for number in range(MACHINES):
        said = [line for line in done.stdout.splitlines() if line.startswith(f"machine-{number} ")]
        packets = [int(line.rpartition(" ")[2]) for line in said[-2:]]
        assert sum(packets) > 100, packets
    alone = start(tmp_path, "--output", str(tmp_path / "alone"), *STEPS)
    code, stdout, stderr = wait(alone, 200)
    assert code == 0, stdout + stderr
    losses = losses_of(tmp_path / "run")
    assert len(losses) == 5
    assert losses == losses_of(tmp_path / "alone")
