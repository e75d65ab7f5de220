"""The machine that tests/verbs runs in, from outside: tools/test-verbs runs these on the host."""

import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from guest import DEADLINE_S, MACHINE, run


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """One guest that does many things; what it said, and the folders it saw."""
    share, here = tmp_path_factory.mktemp("share"), tmp_path_factory.mktemp("here folder")
    (share / "question").write_text("from the host\n")
    (here / "kept").write_text("the host's\n")
    script = """
        for device in rxe0 rxe1 rxe2 rxe3; do
            echo "$device $(cat /sys/class/infiniband/$device/ports/1/state)"
        done
        echo "folder $PWD"
        echo "variable $OWN_VARIABLE"
        printf 'argument <%s>\\n' "$@"
        echo "share $RDMA_MACHINE_SHARE $(cat "$RDMA_MACHINE_SHARE/question")"
        echo "from the guest" >/share/answer
        echo "the guest's" >kept; echo "inside $(cat kept)"
        echo "input <$(cat)>"
        printf 'a\\000b\\033\\tc' >&2
        exit 37
    """
    done = run(
        "bash",
        "-c",
        script,
        "name",
        "two words",
        "$HOME `id` 'quoted'",
        "",
        cwd=here,
        env=os.environ | {"RDMA_MACHINE_SHARE": str(share), "OWN_VARIABLE": "a\nb $c 'd'"},
    )
    return done, share, here


def test_four_devices_are_active(tour):
    lines = tour[0].stdout.splitlines()
    assert [line for line in lines if line.startswith("rxe")] == [
        f"rxe{i} 4: ACTIVE" for i in range(4)
    ], tour[0]


def test_the_exit_code_is_the_commands(tour):
    assert tour[0].returncode == 37


def test_folder_environment_and_arguments_are_the_callers(tour):
    done, _, here = tour
    assert f"folder {here}\n" in done.stdout
    assert "variable a\nb $c 'd'\n" in done.stdout
    arguments = ["two words", "$HOME `id` 'quoted'", ""]
    assert "".join(f"argument <{each}>\n" for each in arguments) in done.stdout
    assert "input <>\n" in done.stdout


def test_both_outputs_arrive_byte_for_byte_and_apart(tour):
    assert tour[0].stderr == "a\0b\x1b\tc"


def test_the_share_is_seen_by_both_sides(tour):
    done, share, _ = tour
    assert "share /share from the host\n" in done.stdout
    assert (share / "answer").read_text() == "from the guest\n"


def test_other_writes_vanish(tour):
    done, _, here = tour
    assert "inside the guest's\n" in done.stdout
    assert (here / "kept").read_text() == "the host's\n"


def test_a_command_ended_by_a_signal_or_not_found_ends_as_in_a_shell():
    assert run("bash", "-c", "kill -TERM $$").returncode == 128 + 15
    missing = run("no-such-command")
    assert missing.returncode == 127
    assert "no-such-command" in missing.stderr


def test_output_appears_while_the_command_runs_and_a_hung_one_ends_at_the_time_limit(tmp_path):
    command = "echo started; sleep 1000"
    with subprocess.Popen(
        [MACHINE, "--guest", "--time-limit", "20", "bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as machine:
        watchdog = threading.Timer(DEADLINE_S, machine.kill)
        watchdog.start()
        assert machine.stdout.readline() == "started\n"
        assert machine.poll() is None  # a line is heard while the command still runs
        _, errors = machine.communicate()
        watchdog.cancel()
    assert machine.returncode == 124
    assert "time limit of 20 s" in errors
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tme-limit", "3", "true"], "there is no option --tme-limit"),
        (["--time-limit", "soon", "true"], "--time-limit takes a whole number above 0, not 'soon'"),
        (["--memory"], "--memory takes a whole number above 0, not ''"),
        ([], "a COMMAND is needed"),
    ],
)
def test_bad_options_get_one_sentence(arguments, sentence):
    done = run(*arguments, guest=False)
    assert done.returncode == 2
    assert done.stderr == f"rdma-machine: {sentence} (see --help)\n"


@pytest.mark.parametrize("mib", ["255", "9999999"])
def test_memory_that_no_guest_can_have_is_refused(mib):
    done = run("--memory", mib, "true", guest=False)
    assert done.returncode == 2
    expected = (
        rf"rdma-machine: --memory takes from 256 to the \d+ MiB that this host has, not '{mib}'"
    )
    assert re.fullmatch(expected + r" \(see --help\)\n", done.stderr)


def test_a_missing_package_is_named(tmp_path):
    """The kernel is not built where the cache is empty and PATH has no parser generator."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in (
        "bash",
        "bc",
        "cat",
        "cut",
        "dirname",
        "env",
        "gcc",
        "make",
        "sha256sum",
        "uname",
        "xz",
    ):
        (tools / name).symlink_to(shutil.which(name))
    done = run(
        "true",
        env={"PATH": str(tools), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 125
    assert done.stderr.endswith("is built with Debian's flex bison: install that\n"), done.stderr


def test_the_example_of_a_direct_run_needs_no_guest():
    """The command runs directly in the guest, because RDMA devices are active there."""
    done = run(MACHINE, sys.executable, "-c", "print(open('/proc/sys/kernel/hostname').read())")
    assert done.stdout.strip() == "rdma-machine", done
