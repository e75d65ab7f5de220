"""Runs tools/rdma-machine, which starts guests, with a deadline."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "tools" / "rdma-machine"
DEADLINE_S = 240


def run(*command, guest=True, deadline_s=DEADLINE_S, **settings):
    options = ["--guest"] if guest else []
    return subprocess.run(
        [MACHINE, *options, *command],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        **settings,
    )
