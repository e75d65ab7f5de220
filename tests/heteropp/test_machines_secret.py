"""A job over several machines has one secret, which no stranger can read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from lab_job import FOREVER, MACHINES, NODE, PLAN, lab_job, metrics_of
from sampled import sampled

from heteropp.description.plan import write_plan

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "elastic.md"

# What a stranger on a machine reads in the stores of the first one; {port}: the rendezvous'.
STRANGER = """
import json, sys
from contextlib import suppress
from datetime import timedelta
import torch.distributed as dist
found = {}
for port in map(int, sys.argv[1:]):
    store = dist.TCPStore("machine-0", port, is_master=False)
    store.set_timeout(timedelta(seconds=1))
    found[port] = {}
    for key in filter(lambda key: store.check([key]), store.list_keys()):
        with suppress(dist.DistStoreError):  # somebody has removed it meanwhile
            found[port][key] = store.get(key).decode(errors="replace")
print(json.dumps(found))
"""


def guide_line() -> str:
    """The guide's command line for an elastic run over several nodes."""
    blocks = re.findall(r"```shell\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (line,) = (block for block in blocks if "torchrun" in block and "--elastic" in block)
    return line


@pytest.mark.long
def test_the_guide_s_line_trains_over_three_machines_and_its_store_has_no_secret(
    tmp_path: Path,
) -> None:
    with lab_job(tmp_path) as job:
        for machine in job.machines:
            machine.do(f"echo {job.machines[0].address} host >> /etc/hosts")
        own = [guide_line().strip().replace("a-0", f"{NODE}-{i}") for i in range(MACHINES)]
        lines = [f"{line} --steps {FOREVER}" for line in own]  # until the stranger has read all
        job.start_by(lines)
        output = tmp_path / "runs" / "train"
        job.wait_for(lambda: len(metrics_of(output)) >= 3, 250)
        secret = output / ".secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        heard = tmp_path / "heard.txt"
        with heard.open("w") as file:
            asking = [sys.executable, "-c", STRANGER, "29400", job.started()[0]["MASTER_PORT"]]
            job.machines[2].start(asking, {"PYTHONWARNINGS": "ignore"}, file).wait(100)
        found = json.loads(heard.read_text().splitlines()[-1])
        values = [value for keys in found.values() for value in keys.values()]
        assert any("ready" in key or "generation" in key for keys in found.values() for key in keys)
        assert not any(secret.read_text() in value for value in values)
        drawn = [key for keys in found.values() for key in keys if key.endswith("/secret")]
        assert all(not value for keys in found.values() for k, value in keys.items() if k in drawn)


@pytest.mark.parametrize("elastic", sampled([False, True], 2), ids=["plain", "elastic"])
def test_machines_with_unlike_secrets_end_and_say_so(tmp_path: Path, elastic: bool) -> None:
    with lab_job(tmp_path) as job:
        write_plan(PLAN, tmp_path / "plan.json")
        for number in range(MACHINES):
            path = tmp_path / f"secret-{number}"
            path.touch(0o600)
            path.write_text("another" if number == 2 else "the job's")
            job.environments[number] = {"DICOMM_SECRET_FILE": str(path)}
        job.start("--steps", "3", elastic=elastic)
        third, first = (
            (f"{NODE}-2", f"{NODE}-0")
            if elastic
            else ("rank 2 (chip NEUTRAL) on machine-2", "rank 0 (chip NEUTRAL) on machine-0")
        )
        sentence = "has another secret than"
        for number in range(MACHINES):
            job.wait_for(lambda number=number: sentence in job.said_by(number), 200)
        said = job.said()
        if not elastic:
            assert f"{third} {sentence} {first}; expected one for all nodes" in said
        assert not metrics_of(job.output)
