"""tools/machines: machines made of namespaces, which share nothing but a network and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab import lab

ROOT = Path(__file__).parents[1]
DEADLINE_S = 120
REFUSED = 77

# Each machine leaves its mark where others must not see it, and hears all of them by name.
ALONE = """
import os, pathlib, socket, threading
number, addresses = int(os.environ["{0}"]), os.environ["{0}S"].split(",")
for folder in ("/tmp", "/dev/shm"):
    pathlib.Path(folder, f"mark-{{number}}").touch()
listener = socket.create_server((addresses[number], 4000))
def answer():
    for _ in addresses:
        listener.accept()[0].sendall(socket.gethostname().encode())
answering = threading.Thread(target=answer)
answering.start()
heard = []
for other in range(len(addresses)):
    while True:
        try:
            heard.append(socket.create_connection((f"machine-{{other}}", 4000)).recv(99).decode())
            break
        except ConnectionRefusedError:
            pass
answering.join()
marks = [p.name for folder in ("/tmp", "/dev/shm") for p in pathlib.Path(folder).glob("mark-*")]
processes = [name for name in os.listdir("/proc") if name.isdigit()]
print(number, heard, marks, len(processes) < 9, os.getcwd())
raise SystemExit(number)
""".format("HYPERHETERO_MACHINE")


def tool(*arguments: str, within: Sequence[str] = ()) -> list[str]:
    return [*within, str(ROOT / "tools" / "machines"), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(*arguments: str, within: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        tool(*arguments, within=within),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def wait_for(comes: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not comes():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def links() -> set[str]:
    """The names of this host's own network devices, which must stay as they are."""
    return set(os.listdir("/sys/class/net"))


def processes_of(mark: str) -> list[str]:
    """Processes of this host, those in namespaces included, with a mark in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if mark in words:
            found.append(path.parent.name)
    return found


def test_machines_share_files_and_a_network_and_nothing_else(tmp_path: Path) -> None:
    with lab(1, tmp_path):  # or else it is skipped
        before = links()
    done = run("3", "--", sys.executable, "-c", ALONE)
    assert done.returncode == 2, done  # the worst
    said = sorted(done.stdout.splitlines())
    names = ["machine-0", "machine-1", "machine-2"]
    assert said == [
        f"machine-{i} | {i} {names} {[f'mark-{i}'] * 2} True {Path.cwd()}" for i in range(3)
    ]
    assert links() == before


def test_a_user_without_rights_has_machines_too(tmp_path: Path) -> None:
    with lab(1, tmp_path):
        pass
    someone = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if os.geteuid() or subprocess.run([*someone, "true"], capture_output=True).returncode:
        someone = []  # this is such a user already, or user namespaces are root's alone
    done = run("2", "--", "sh", "-c", "hostname; id -u", within=someone)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [
        *("machine-0 | 0", "machine-0 | machine-0", "machine-1 | 0", "machine-1 | machine-1"),
    ]


def test_a_folder_in_tmp_is_shared_and_tmp_is_not(tmp_path: Path) -> None:
    with lab(2, tmp_path) as there:
        for machine in there:
            path = tmp_path / f"{machine.name}.txt"
            with path.open("w") as file:
                script = f"touch /tmp/mark-{machine.name}; ls /tmp"
                machine.start(["sh", "-c", script], {**os.environ}, file).wait(DEADLINE_S)
            marks = [line for line in path.read_text().split() if line.startswith("mark-")]
            assert marks == [f"mark-{machine.name}"]
    assert not list(Path("/tmp").glob("mark-machine-*"))


def test_a_killed_tool_leaves_nothing(tmp_path: Path) -> None:
    with lab(1, tmp_path):
        before = links()
    for number in (signal.SIGKILL, signal.SIGTERM):
        mark = f"77{os.getpid()}.{number:d}"  # seconds
        started = subprocess.Popen(
            tool("2", "--", "sleep", mark),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda mark=mark: len(processes_of(mark)) >= 4)  # tool, shell, two commands
        started.send_signal(number)
        assert started.wait(DEADLINE_S) in (-signal.SIGKILL, 128 + signal.SIGTERM)
        wait_for(lambda mark=mark: not processes_of(mark))
    assert links() == before


WATCHED = """
import socket, time
last = None
while True:
    try:
        socket.create_connection(("machine-0", 4000), timeout=0.5)
        state = "reached"
    except OSError as error:
        state = "missed" if isinstance(error, TimeoutError) else "unreachable"
    if state != last:
        print(state, flush=True)
        last = state
    time.sleep(0.05)
"""
SERVED = "import socket; s = socket.create_server(('', 4000)); [s.accept() for _ in iter(int, 1)]"


def test_a_machine_is_cut_off_down_stopped_and_killed(tmp_path: Path) -> None:
    path = tmp_path / "watched.txt"
    with lab(2, tmp_path) as (server, client), path.open("w") as file, open(os.devnull, "w") as off:

        def expect(*states: str) -> None:
            wait_for(lambda: path.read_text().split()[-len(states) :] == list(states))

        serving = server.start([sys.executable, "-c", SERVED], os.environ, off)
        watching = client.start([sys.executable, "-c", WATCHED], os.environ, file)
        expect("reached")
        server.cut_off()
        expect("reached", "missed")
        server.come_back()
        wait_for(lambda: path.read_text().split()[-1] == "reached")
        client.down()
        expect("reached", "unreachable")
        client.up()
        wait_for(lambda: path.read_text().split()[-1] == "reached")
        client.stop()
        before = path.read_text()
        server.cut_off()
        time.sleep(2)  # longer than the client would need to see it
        assert path.read_text() == before
        client.go_on()
        wait_for(lambda: path.read_text().split()[-1] in ("missed", "unreachable"))
        server.kill()
        assert serving.wait(DEADLINE_S) != 0
        assert watching.poll() is None


def test_events_come_by_the_clock(tmp_path: Path) -> None:
    with lab(1, tmp_path):
        pass
    script = "[ $HYPERHETERO_MACHINE = 1 ] || sleep 1000; echo done"
    done = run("2", "--at", "1 kill 0", "--at", "0 stop 0", "--", "sh", "-c", script)
    assert done.returncode == 0, done  # a machine that was killed on purpose has not failed
    assert done.stdout == "machine-1 | done\n"
    assert done.stderr == "machines: stop machine-0\nmachines: kill machine-0\n"


def test_a_machine_without_a_process_is_stopped_and_goes_on(tmp_path: Path) -> None:
    with lab(1, tmp_path) as (machine,):
        machine.stop()
        machine.go_on()
        echo = machine.start(["echo", "here"], environment(), subprocess.PIPE)
        assert echo.communicate(timeout=DEADLINE_S) == ("here\n", None)


def test_bad_input_is_one_sentence() -> None:
    for arguments, words in (
        (["2", "--at", "5 cut 0", "--", "true"], ["--at is '5 cut 0'", "cut-off", "0 to 1"]),
        (["2", "--at", "5 kill 2", "--", "true"], ["--at is '5 kill 2'", "0 to 1"]),
        (["0", "--", "true"], ["'N'", "at least 1"]),
        (["2"], ["COMMAND"]),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done
        assert len(done.stderr.splitlines()) == 1 and all(word in done.stderr for word in words)


def test_a_host_that_makes_no_namespaces_says_so(tmp_path: Path) -> None:
    with lab(1, tmp_path):
        pass
    none = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    refusing = ["unshare", "--user", "--map-root-user", "sh", "-c", none, "-"]
    done = run("1", "--", "true", within=refusing)
    assert done.returncode == REFUSED, done
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("machines: no namespaces can be made here (unshare: ")
