"""Unmodified scripts of three kinds run on every emulated chip and on a machine without one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import forks
from on_chip import DEADLINE_S, environment, run_each

SCRIPTS = Path(__file__).parent / "scripts"


CHIPS = ["a-mini", "b-mini", "c-mini", "d-mini", "c", None]


def test_three_kinds_of_script_run_on_every_chip() -> None:
    code = (
        "import runpy, ditorch\n"
        f"run = lambda name: runpy.run_path({str(SCRIPTS)!r} + '/' + name, run_name='__main__')\n"
        "run('accelerator.py')\n"
        "run('unified_name.py')\n"
        "ditorch.enable(cuda_compat=True)\n"
        "run('hard_coded_cuda.py')\n"
    )
    environments = [{"DITORCH_CHIP": chip} if chip else {} for chip in CHIPS]
    for chip, done in zip(CHIPS, run_each(code, environments), strict=True):
        assert done.returncode == 0, f"on {chip}: {done.stderr}"
        honest = "emuchip" if chip else "cpu"
        assert done.stdout.splitlines() == [
            f"accelerator: {honest}",
            f"unified name: {honest}",
            f"hard-coded cuda: {honest}",
        ]


def run_command(*arguments: str, chip: str | None, **extra: str) -> subprocess.CompletedProcess:
    return forks.run(
        ["-m", "ditorch", *arguments], environment(chip, **extra), timeout_s=DEADLINE_S
    )


def test_the_command_runs_an_unmodified_script_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "helper.py").write_text("NAME = 'helper'\n")
    script.write_text(
        "import sys, torch, helper\n"
        "print(sys.argv[1:], __name__, helper.NAME, torch.ones(1).cuda().device)\n"
        "sys.exit(3)\n"
    )
    done = run_command("run", "--cuda-compat", str(script), "--json", "-x", "1", chip="a-mini")
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "['--json', '-x', '1'] __main__ helper emuchip:0"


def test_the_command_names_a_script_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "none.py"
    done = run_command("run", str(missing), chip=None)
    assert done.returncode == 2
    assert done.stderr.strip() == f"ditorch: there is no script {str(missing)!r}"
