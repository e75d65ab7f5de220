"""Several guests, each a machine of its own: tools/rdma-machine --machines."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from guest import DEADLINE_S, MACHINE, ROOT, run

HERE = Path(__file__).parent
DELAY_S = 0.02
BOTH_RAILS = ["rxe0:1", "rxe1:1"]
BROKEN = 1  # the machine whose second rail is taken away


def run_on_machines(machines, share, *words):
    """How the tool ended, and what each machine said, line by line."""
    own = {"RDMA_MACHINE_SHARE": str(share), "PYTHONPATH": str(ROOT)}
    done = run("--machines", str(machines), *words, guest=False, env=os.environ | own)
    said = {f"machine-{number}": [] for number in range(machines)}
    for line in done.stdout.splitlines():
        machine, _, text = line.partition(" | ")
        said[machine].append(text)
    return done, said


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    share = tmp_path_factory.mktemp("share")
    done, said = run_on_machines(
        *(3, share, "--delay", "20ms"), sys.executable, HERE / "tour_of_machines.py"
    )
    assert all(said.values()), done
    return done, {machine: json.loads(lines[-1]) for machine, lines in said.items()}


def test_each_machine_has_a_kernel_a_name_and_memory_of_its_own(tour):
    _, said = tour
    assert len({each["boot"] for each in said.values()}) == 3
    for number, (machine, each) in enumerate(said.items()):
        assert each["host"] == machine
        assert each["addresses"] == ["10.1.0.1", "10.1.0.2", "10.1.0.3"]
        assert each["marks"] == [f"mark-{number}"] * 2


def test_both_devices_of_each_are_active(tour):
    for each in tour[1].values():
        assert each["devices"] == {"rxe0": "4: ACTIVE", "rxe1": "4: ACTIVE"}


def test_all_reach_each_other_on_both_networks_and_a_delay_is_one_way(tour):
    for machine, each in tour[1].items():
        for network in ("by_name", "by_second_rail"):
            assert set(each[network]) == set(tour[1]) - {machine}
            for called, (answer, took_s) in each[network].items():
                assert answer == called
                assert took_s >= 2 * DELAY_S


def test_the_share_is_one(tour):
    for each in tour[1].values():
        assert each["seen"] == list(tour[1])


def test_the_exit_code_is_the_worst(tour):
    done, _ = tour
    assert done.returncode == 2, done  # each machine's is its number


def test_packets_are_lost_and_a_rail_is_as_slow_as_told(tmp_path):
    options = ("--loss", "30%", "--rate", "2mbit")
    script = (sys.executable, HERE / "lossy_network.py")
    done, said = run_on_machines(2, tmp_path, *options, *script)
    assert done.returncode == 0, done
    (came,), (took_s,) = said["machine-0"], said["machine-1"]
    assert 200 <= int(came) <= 650  # of 800
    assert float(took_s) >= 1.5  # for 4 Mbit or more, of which some may be lost elsewhere


def processes_with(mark):
    """The command lines of this host's processes that have a mark in them, or in their folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            folder = os.readlink(path / "cwd")
        except OSError:  # it has ended
            continue
        if any(mark in word for word in [*words, folder]):
            found.append(words)
    return found


def test_a_signal_ends_all_guests(tmp_path):
    with subprocess.Popen(
        [MACHINE, "--machines", "2", "bash", "-c", "echo started; sleep 1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as machines:
        watchdog = threading.Timer(DEADLINE_S, machines.kill)
        watchdog.start()
        started = {machines.stdout.readline() for _ in range(2)}
        assert started == {"machine-0 | started\n", "machine-1 | started\n"}
        assert len(processes_with(str(tmp_path))) > 2
        machines.terminate()
        assert machines.wait() == 128 + signal.SIGTERM
        watchdog.cancel()
    deadline_s = time.monotonic() + DEADLINE_S
    while left := processes_with(str(tmp_path)):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_hung_machines_end_at_the_time_limit(tmp_path):
    command = ("--machines", "2", "--time-limit", "5", "sleep", "1000")
    done = run(*command, guest=False, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 124
    assert done.stderr == "rdma-machine: the time limit of 5 s has passed: the guests were ended\n"
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_goes_ends_the_others(tmp_path):
    power_off = "syscall 169, 0xfee1dead, 672274793, 0x4321fedc, 0"
    script = f"[ $HYPERHETERO_MACHINE = 1 ] || sleep 1000; exec perl -e '{power_off}'"
    command = ("--machines", "2", "bash", "-c", script)
    done = run(*command, guest=False, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 125, done
    assert done.stderr.endswith("the guest machine-1 ended without a result (code 0)\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--machines", "0"], "--machines takes a whole number above 0, not '0'"),
        (["--machines", "251"], "--machines takes at most 250, not '251'"),
        (["--machines", "2", "--delay", "5"], "--delay takes a time such as 5ms or 250us, not '5'"),
        (["--machines", "2", "--loss", "101%"], "--loss takes a share such as 1%, not '101%'"),
        (["--machines", "2", "--rate", "fast"], "--rate takes a rate such as 100mbit, not 'fast'"),
        (["--delay", "5ms"], "--delay, --loss and --rate need --machines"),
    ],
)
def test_bad_options_get_one_sentence(arguments, sentence):
    done = run(*arguments, "true", guest=False)
    assert done.returncode == 2
    assert done.stderr == f"rdma-machine: {sentence} (see --help)\n"


@pytest.fixture(scope="module")
def over_verbs(tmp_path_factory):
    """A job of three ranks on networks that delay and lose packets, one on each machine."""
    share = tmp_path_factory.mktemp("share")
    options = ("--delay", "2ms", "--loss", "1%")
    script = (sys.executable, HERE / "rail_ranks.py", str(BROKEN))
    done, said = run_on_machines(3, share, *options, *script)
    assert done.returncode == 0, done
    return [json.loads(lines[-1]) for lines in said.values()]


def test_messages_between_machines_go_over_both_rails_and_are_exact(over_verbs):
    for rank, said in enumerate(over_verbs):
        assert said["exchanged"]
        assert set(said["links"]) == {str(peer) for peer in range(3) if peer != rank}
        for link in said["links"].values():
            assert link["transport"] == "verbs"
            assert [rail["device"] for rail in link["rails"]] == BOTH_RAILS
            assert all(rail["up"] for rail in link["rails"])


def test_an_all_reduce_between_machines_goes_over_rdma_and_is_exact(over_verbs):
    for said in over_verbs:
        assert said["reduced"]
        assert sum(said["packets"]) > 128  # of 4 KiB, for half a MiB


def test_a_rail_that_is_taken_away_loses_nothing(over_verbs):
    for rank, said in enumerate(over_verbs):
        assert said["passed"] and said["reduced_after"]
        for peer, link in said["links_after"].items():
            is_broken = BROKEN in (rank, int(peer))
            assert [rail["up"] for rail in link["rails"]] == [True, not is_broken], (rank, peer)
