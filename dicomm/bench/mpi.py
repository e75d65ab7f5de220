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
LAYERS = {"shm": ["vader,self"], "tcp": ["tcp,self", "--mca", "btl_tcp_if_include", "lo"]}


@cache
def why_absent() -> str | None:
    for tool in ("mpirun", "mpicc"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        return "mpirun is not Open MPI's, whose options are the ones known here"
    return None


class Mpi(LineProgram):
    def __init__(self, name: str, transport: str, ranks: int, folder: str) -> None:
        program = Path(folder) / "mpi"
        if not program.exists():
            _compile(program)
        command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
        command += ["--mca", "pml", "ob1", "--mca", "btl", *LAYERS[transport]]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        super().__init__(name, [*command, program])


def _compile(program: Path) -> None:
    done = subprocess.run(
        ["mpicc", "-O2", "-o", program, SOURCE], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failed(f"mpicc does not compile it: {done.stderr.strip().splitlines()[0][:200]}")
