"""Many short processes for the price of one import of torch: each is a fork of a warm one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from on_chip import DEADLINE_S, environment

_WARM = """
import json, os, sys, torch
code, folder, environments = json.loads(sys.stdin.read())
for number, extra in enumerate(environments):
    child = os.fork()
    if child == 0:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), fd)
        os.environ.update(extra)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if child == 0:
    exec(compile(code, "<case>", "exec"), {"__name__": "__main__"})
"""


def run_each(
    code: str, environments: list[dict[str, str]], folder: Path, **common: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `code` once with each environment, in a process of its own that has imported torch."""
    warm = subprocess.run(
        [sys.executable, "-c", _WARM],
        env=environment(None, **common),
        input=json.dumps([code, str(folder), environments]),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert warm.returncode == 0, warm.stderr
    codes = [int(line) for line in warm.stdout.split()]
    assert len(codes) == len(environments), warm.stdout
    return [
        subprocess.CompletedProcess(
            str(environments[number]),
            code,
            (folder / f"{number}.out").read_text(),
            (folder / f"{number}.err").read_text(),
        )
        for number, code in enumerate(codes)
    ]
