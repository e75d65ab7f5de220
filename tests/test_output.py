"""What the commands do to the file or folder that they are to write: nothing else is harmed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
from commands import run_command
from installed import lack

import dicomm.cli
from heteropp.cli import data, search, simulate
from hyperhetero.output import LockError, held, write_file

HOLD = (
    "import sys, hyperhetero.output as o, pathlib; lock = o.held(pathlib.Path(sys.argv[1]), 'it'); "
)
HOLD += "lock.__enter__(); print('held', flush=True); sys.stdin.read()"


def device(path: Path, minor: int) -> Path:
    """A memory device of our own: 3 is null, 7 is full."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        path.open("rb").close()
    except OSError as error:
        lack(f"no devices can be made here ({error.strerror})", "root on a whole machine")
    return path


def align(*arguments: object) -> tuple[int, str]:
    """ditorch-align, which settles its process's environment for itself."""
    said = forks.run(["-m", "ditorch_align", *map(str, arguments)], os.environ, timeout_s=60)
    return said.returncode, said.stderr


Command = Callable[[Path], tuple[int, str]]  # with an output: exit code, what it said


def run(app: object, *arguments: object) -> tuple[int, str]:
    result = run_command(app, [str(each) for each in arguments])
    return result.exit_code, result.stderr


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    """Each with little to do; by the suffix that its output has."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "model.toml").write_text(
        'name = "m"\nlayers = 2\nhidden = 32\nheads = 4\nkv_heads = 4\nintermediate = 64\n'
        "vocab = 256\nsequence_length = 16\n"
    )
    (folder / "cluster.toml").write_text('name = "c"\n[[nodes]]\nchip = "b-mini"\nchips = 1\n')
    (folder / "text").write_text("some text")
    asked = ("--cluster", folder / "cluster.toml", "--model", folder / "model.toml")
    asked += ("--global-batch", "1")
    assert run(search.app, *asked, "-o", folder / "plan.json")[0] == 0
    shown = ("--plan", folder / "plan.json", "--cluster", folder / "cluster.toml")
    return {
        "search.json": lambda path: run(search.app, *asked, "--output", path),
        "trace.json": lambda path: run(simulate.app, *shown, "--trace", path),
        "timeline.png": lambda path: run(simulate.app, *shown, "--picture", path),
        "out.tokens": lambda path: run(data.app, folder / "text", "--output", path),
        "topo.svg": lambda path: run(dicomm.cli.app, "topo", "--plot", path),
    }


NAMES = ["search.json", "trace.json", "timeline.png", "out.tokens", "topo.svg"]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_device_stays_one(commands: dict[str, Command], name: str, tmp_path: Path) -> None:
    full = device(tmp_path / name, 7)
    code, said = commands[name](full)
    assert (code, said.count("\n")) == (2, 1), said
    assert str(full) in said and "cannot be written" in said
    assert stat.S_ISCHR(full.stat().st_mode)
    assert os.listdir(tmp_path) == [name], "nothing is left beside it"


@pytest.mark.parametrize("name", NAMES)
def test_a_link_stays_one_and_a_file_keeps_its_permissions(
    commands: dict[str, Command], name: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / name
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("there/target")
    code, said = commands[name](link)
    assert code == 0, said
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert len(target.read_bytes()) > 100
    assert os.listdir(target.parent) == ["target"], "nothing is left beside it"


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    pipe, read = tmp_path / "pipe", bytearray()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.extend(pipe.read_bytes()))
    reader.start()
    write_file(pipe, content)
    reader.join(20)
    assert bytes(read) == content and pipe.is_fifo()
    nothing = device(tmp_path / "null", 3)
    write_file(nothing, content)
    assert stat.S_ISCHR(nothing.stat().st_mode)


def test_standard_output_keeps_what_is_said_around_it(tmp_path: Path) -> None:
    program = (
        "import hyperhetero.output as o, pathlib; print('before');"
        "o.write_file(pathlib.Path('/dev/stdout'), b'content\\n'); print('after')"
    )
    with (tmp_path / "file").open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert (tmp_path / "file").read_text() == "before\ncontent\nafter\n"
    piped = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert piped.stdout == b"before\ncontent\nafter\n"


def test_a_page_with_data_beside_it_is_no_device(tmp_path: Path) -> None:
    page = device(tmp_path / "page.html", 3)
    (tmp_path / "findings").mkdir()
    findings = {"tool": "loss", "passed": True}
    (tmp_path / "findings" / "loss-rank0.json").write_text(json.dumps(findings))
    code, said = align("report", tmp_path / "findings", "--html", page)
    assert code == 2 and "It is a device or a pipe" in said
    assert stat.S_ISCHR(page.stat().st_mode) and not (tmp_path / "page.json").exists()


# --- one at a time ------------------------------------------------------------------------------


def holder(lock: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout and process.stdout.readline() == b"held\n"
    return process


def test_one_process_at_a_time_and_the_dead_are_followed(tmp_path: Path) -> None:
    lock, said = tmp_path / "lock", list[str]()
    process = holder(lock)
    with (
        pytest.raises(LockError, match=f"it is used by process {process.pid} on host "),
        held(lock, "it"),
    ):
        pass
    process.kill()
    process.communicate()
    with held(lock, "it", say=said.append):
        assert re.fullmatch(
            rf"it was used by process {process.pid} on host {re.escape(socket.gethostname())} "
            r"since \d{4}-\d\d-\d\d .*, which is gone; this run takes it over",
            said[0],
        )
    assert not lock.exists()
    process = holder(lock)
    process.communicate(b"")  # ends as it should
    with held(lock, "it", say=said.append):
        pass
    assert len(said) == 1, "nobody was there"


def test_a_job_that_begins_anew_follows_itself_in_silence(tmp_path: Path) -> None:
    lock, said = tmp_path / "lock", list[str]()
    process = holder(lock)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with held(lock, "it", own=True, say=said.append):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert said == []


def test_another_host_is_respected_where_locks_are_not_shared(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "yesterday"}))
    with (
        pytest.raises(LockError, match="process 7 on host elsewhere since yesterday, which cannot"),
        held(lock, "it"),
    ):
        pass
    assert lock.exists()


def test_an_alignment_has_its_folder_alone(tmp_path: Path) -> None:
    with held(tmp_path / ".lock", "it"):
        for arguments in (("run",), ("isolate", __file__, "--chip", "d")):
            code, said = align(*arguments, "--output", tmp_path)
            assert code == 2 and f"is used by process {os.getpid()} on host" in said
