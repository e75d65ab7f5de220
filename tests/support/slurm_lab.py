"""A real Slurm over the machines of tools/machines, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from installed import need
from lab import lab
from machines import Machine

ROOT = Path(__file__).parents[2]
# of each machine, as Slurm's Gres has them
CHIPS = ("gpu:h20:2", "gpu:a100:2", "npu:910b:1")
QUICKSTART_CHIPS = ("gpu:a-mini:2", "gpu:c-mini:2", "npu:b-mini:1")
COMES_S = 120
# No munge: all messages are between machines of this one. The daemons' sockets are in a
# machine's own /tmp, as their paths have to be short.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=machine-0
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
MailProg=/bin/true
GresTypes=gpu,npu
PartitionName=nvidia Nodes=machine-[0-1] Default=YES
PartitionName=ascend Nodes=machine-2
"""


class Slurm:
    """A controller on machine-0, and a daemon on each machine."""

    def __init__(self, folder: Path, there: list[Machine], chips: Sequence[str]) -> None:
        """folder: of Slurm's own files; jobs are submitted in the one above it.

        chips: of each machine.
        """
        self.folder, self.machines = folder, there
        gres = ""
        configuration = CONFIGURATION.format(folder=folder)
        for machine, own in zip(there, chips, strict=True):
            kind, product, count = own.split(":")
            # a GPU is a device for Slurm, any will do
            there_is = "File=/dev/null,/dev/zero" if kind == "gpu" else f"Count={count}"
            gres += f"NodeName={machine.name} Name={kind} Type={product} {there_is}\n"
            configuration += f"NodeName={machine.name} CPUs=4 Gres={own}\n"
        (folder / "state").mkdir(parents=True)
        (folder / "gres.conf").write_text(gres)
        (folder / "slurm.conf").write_text(configuration)
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self.environment.pop("DICOMM_SECRET", None)  # one that was drawn in this process
        with (folder / "daemons.txt").open("w") as output:
            there[0].start(["slurmctld", "-D"], self.environment, output)
            for machine in there:
                machine.start(["slurmd", "-D", "-N", machine.name], self.environment, output)
        self.wait_for(lambda: self.say("sinfo", "-h", "-o", "%D %t", "-N").count("idle") == 3)

    def say(self, *command: str, **environment: str) -> str:
        """Runs a command of Slurm's on machine-0, and returns what it says."""
        done = subprocess.run(
            self.machines[0].namespaces.inside(
                "sh", "-c", 'cd "$0"; exec "$@"', self.jobs, *command
            ),
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=COMES_S,
        )
        return done.stdout + done.stderr

    @property
    def jobs(self) -> str:
        return str(self.folder.parent)

    def submit(self, *arguments: str, **environment: str) -> str:
        """Returns the job's number."""
        said = self.say("sbatch", "--parsable", *arguments, **environment)
        assert said.strip().isdigit(), said
        return said.strip()

    def state(self, job: str) -> str:
        """What scontrol says of a job, parts of a heterogeneous one included."""
        return self.say("scontrol", "show", "job", job)

    def requeue(self, job: str, times: int = 1) -> None:
        """Returns when the job runs again; times: that it has been requeued, with this one."""
        self.say("scontrol", "requeue", job)
        self.wait_for(lambda: f"Restarts={times}" in self.state(job))

        def runs() -> bool:
            # where nothing changes, Slurm does not look at a heterogeneous job again
            self.say("scontrol", "update", "partitionname=ascend", "state=up")
            return "JobState=RUNNING" in self.state(job)

        self.wait_for(runs)

    def output(self, job: str) -> str:
        path = self.folder.parent / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, comes: Callable[[], bool], within_s: float = COMES_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not comes():
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.5)

    def said(self) -> str:
        """All that jobs and daemons said, for the message of a failed test."""
        files = [*self.folder.parent.glob("slurm-*.out"), *self.folder.glob("*.log")]
        parts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files]
        return "\n".join([*parts, self.say("scontrol", "show", "job")])


@contextmanager
def slurm_lab(folder: Path, chips: Sequence[str] = CHIPS) -> Iterator[Slurm]:
    """Slurm over machines with these chips; jobs are submitted in `folder`, which all have."""
    need("slurm-wlm", "slurmctld")
    with lab(len(chips), folder) as there:
        yield Slurm(folder / "slurm", there, chips)
