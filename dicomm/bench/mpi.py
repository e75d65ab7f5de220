"""MPI, by mpi.c, which is compiled for the MPI that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from dicomm.bench.lines import LineProgram
from dicomm.bench.timing import Failed

SOURCE = Path(__file__).parent / "mpi.c"
# by what moves its messages, then by transport: options of mpirun
OWN, UCX = "Open MPI", "UCX"
_THROUGH_UCX = "--mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any"
LAYERS = {
    OWN: {
        "shm": "--mca pml ob1 --mca btl vader,self",
        "tcp": "--mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo",
    },
    UCX: {
        "shm": f"{_THROUGH_UCX} -x UCX_TLS=self,posix,cma",
        "tcp": f"{_THROUGH_UCX} -x UCX_TLS=self,tcp -x UCX_NET_DEVICES=lo",
    },
}


@cache
def why_absent() -> str | None:
    for tool in ("mpirun", "mpicc"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        return "mpirun is not Open MPI's, whose options are the ones known here"
    return None


@cache
def why_no_ucx() -> str | None:
    """Why MPI's messages cannot go through UCX."""
    if reason := why_absent():
        return reason
    components = subprocess.run(["ompi_info"], capture_output=True, text=True, check=False)
    return None if "pml: ucx" in components.stdout else "Open MPI was built without UCX"


class Mpi(LineProgram):
    def __init__(
        self, name: str, transport: str, ranks: int, folder: str, layer: str = OWN
    ) -> None:
        program = Path(folder) / "mpi"
        if not program.exists():
            _compile(program)
        command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
        command += LAYERS[layer][transport].split()
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        super().__init__(name, [*command, program])


def _compile(program: Path) -> None:
    done = subprocess.run(
        ["mpicc", "-O2", "-o", program, SOURCE], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failed(f"mpicc does not compile it: {done.stderr.strip().splitlines()[0][:200]}")
