"""The guide's lines that start a job by ssh, over machines that reach each other so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from installed import need
from lab_job import losses_of
from sampled import sampled
from ssh_lab import ssh_lab
from training_run import CHIP, NEUTRAL_CHIP, make_plan, tiny_model

from heteropp.description.plan import write_plan

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "machines.md"
MACHINES = 3
STEPS = "--steps 5"


def guide_block(word: str) -> str:
    (block,) = (b for b in re.findall(r"```shell\n(.*?)```", GUIDE.read_text(), re.S) if word in b)
    return block


@pytest.mark.parametrize(
    ("program", "each"), sampled([("ssh", "--nproc-per-node 8"), ("mpirun", "ppr:8:node")], 2)
)
def test_the_guide_s_line_trains_as_one_machine_does(
    tmp_path: Path, program: str, each: str
) -> None:
    if program == "mpirun":
        need("openmpi-bin", "mpirun")
    with ssh_lab(MACHINES, tmp_path) as (there, environment):
        model = tiny_model()
        write_plan(
            make_plan(model, (1, 2, 1), (1, 1, 1), (1, 1, 1), (False,) * 3), tmp_path / "plan.json"
        )
        (tmp_path / CHIP).write_text(NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=1 << 30))
        names = [machine.name for machine in there]
        nodes = "".join(f'[[nodes]]\nname = "{name}"\nchip = "{CHIP}"\n' for name in names)
        (tmp_path / "cluster.toml").write_text(f'name = "test"\n{nodes}')
        # ranks are numbered by the names in the cluster's file, not in this order, under mpirun
        order = names[::-1] if program == "mpirun" else names
        (tmp_path / "hosts").write_text("".join(f"{name}\n" for name in order))
        block = guide_block(f"{program} ")
        assert each in block
        line = block.replace(each, each.replace("8", "1"))
        line = line.replace("cluster.toml", f"cluster.toml {STEPS}")
        said = tmp_path / "said.txt"
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        with said.open("w") as output:
            shell = ["bash", "-euc", f"cd '{tmp_path}'; {line}"]
            started = there[0].start(shell, environment | root, output)
            assert started.wait(200) == 0, said.read_text()
    assert "rank 0" not in said.read_text(), said.read_text()
    alone = subprocess.run(
        f"heteropp-train --plan plan.json --cluster cluster.toml --output alone {STEPS}",
        shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    losses = losses_of(tmp_path / "runs" / "train")
    assert losses == losses_of(tmp_path / "alone")
    assert len(losses) == 5
