"""What cannot be is refused before anything starts: one sentence, exit code 2, and nothing done.

These tests go through every option of every command; what a certain file or option must be is
tested beside its command.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from commands import run_command
from typer.main import get_command

from heteropp.description import files
from hyperhetero.cli import CommandLine

NO_NUMBERS = ["", "x", "nan", "inf", "-inf", "1e999"]
ENDLESS = [str(10**30), "9" * 5000]  # as whole numbers
# options that name what a command writes, and those of them that are folders
WRITTEN = {"--output", "--plot", "--trace", "--picture", "--html", "--markdown", "--kernels"}
FOLDERS = {
    "heteropp-export --output",
    "heteropp-profile --kernels",
    "heteropp-train --output",
    "ditorch-align run --output",
    "ditorch-align isolate --output",
}


def apps() -> Iterator[tuple[str, CommandLine]]:
    for entry in distribution("hyperhetero").entry_points:
        if entry.group == "console_scripts":
            late = {"dicomm-bench": "dicomm.bench.cli"}  # whose main imports its command line
            app = import_module(late.get(entry.name, entry.module)).app
            assert isinstance(app, CommandLine), f"{entry.name} has another kind of command line"
            yield entry.name, app


def leaves(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the commands under one that have none under them, with the words that name them."""
    beneath = getattr(command, "commands", {})
    for name, each in beneath.items():
        yield from leaves((*words, name), each)
    if not beneath:
        yield words, command


def options(kinds: set[type]) -> Iterator[tuple[CommandLine, tuple[str, ...], str]]:
    """Every option of every command whose value is of one of these kinds."""
    for name, app in apps():
        for words, command in leaves((name,), get_command(app)):
            hints = get_type_hints(inspect.unwrap(command.callback))
            for parameter in command.params:
                option = max(parameter.opts, key=len)
                if option.startswith("--") and kinds & kinds_in(hints.get(parameter.name)):
                    yield app, words, option


def kinds_in(hint: Any) -> set[Any]:
    """float of float | None and of list[float]."""
    return {hint}.union(*map(kinds_in, get_args(hint)))


def refused(app: CommandLine, words: tuple[str, ...], *arguments: object) -> str:
    ended = run_command(app, [*words[1:], *arguments])
    where = words, arguments, ended
    assert ended.exit_code == 2 and not ended.stdout, where
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), where
    return ended.stderr


def test_what_is_no_number_is_refused_by_every_option() -> None:
    tried = 0
    for kind, values in ((int, [*NO_NUMBERS, *ENDLESS]), (float, NO_NUMBERS)):
        for app, words, option in options({kind}):
            for value in values:
                said = refused(app, words, option, value)
                assert option in said or option == "--resume-from"  # there is no run to resume
                tried += 1
    assert tried > 100


def test_a_word_that_is_none_of_the_choices_is_told_with_them(tmp_path: Path) -> None:
    app = dict(apps())["heteropp-export-plan"]
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    said = refused(app, ("heteropp-export-plan",), plan, "--to", "nemo")
    assert said.startswith("Invalid value for '--to': 'nemo' is not one of 'megatron', ")


def test_no_command_waits_for_longer_than_clocks_count() -> None:
    tried = 0
    for app, words, option in options({float}):
        if option in ("--deadline", "--notice"):
            assert "expected at most 10000000" in refused(app, words, option, "1e12")
            tried += 1
    assert tried == 5


def test_an_empty_path_is_not_the_folder_that_one_is_in() -> None:
    tried = 0
    for app, words, option in options({Path}):
        said = refused(app, words, option, "")
        assert option in said and ("got an empty text" in said or ". is a folder" in said)
        tried += 1
    assert tried > 30


def test_every_command_looks_at_its_output_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    seen = set()
    for app, words, option in options({Path}):
        if option not in WRITTEN:
            continue
        seen.add(" ".join((*words, option)))
        for name, why in (
            ("loop", "Too many levels of symbolic links"),
            ("loop/x", "Too many levels of symbolic links"),
            ("file/x", f"{tmp_path / 'file'} is a file, not a folder"),
            ("file/x/y", f"{tmp_path / 'file'} is a file, not a folder"),
        ):
            assert why in refused(app, words, option, tmp_path / name)
        folder = " ".join((*words, option)) in FOLDERS
        if words[0] == "heteropp-calibrate":
            continue  # a folder with --runs, a file without
        if folder:
            assert "is a file, not a folder" in refused(app, words, option, tmp_path / "file")
        else:
            assert "is a folder; expected the name" in refused(app, words, option, tmp_path)
    assert seen >= FOLDERS
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_a_pipe_that_nobody_writes_to_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(files, "WRITER_S", 0.1)
    with pytest.raises(files.FileError, match="Nobody writes to this pipe"):
        files.read_text(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("said"))
    monkeypatch.setattr(files, "WRITER_S", 60.0)
    writer.start()
    assert files.read_text(tmp_path / "pipe") == "said"
    writer.join()


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "train --plan plan.json --cluster quickstart --steps 2",
        "profile --cluster quickstart --model quickstart",
    ],
    ids=["train", "profile"],
)
def test_too_little_shared_memory_is_told_before_a_rank_starts(
    command: str, tmp_path: Path
) -> None:
    """/dev/shm of 64 KiB, in a mount namespace of its own, as Docker's own can be too small."""
    names = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*names, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespaces")
    python = shlex.quote(sys.executable)
    search = "--cluster quickstart --model quickstart --global-batch 16 --planner uniform"
    commands = [
        "mount -t tmpfs -o size=64k tmpfs /dev/shm",
        f"{python} -m heteropp.cli.search {search} -o plan.json >&2",
        f"{python} -m heteropp.cli.{command}",
    ]
    done = subprocess.run(
        [*names, "sh", "-ec", "\n".join(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "/dev/shm has 64 KiB free, and" in last and " KiB to start; enlarge it" in last


# --- with everything else as it should be -------------------------------------------------------

SEARCH = ("heteropp.cli.search", "--cluster", "quickstart", "--model", "quickstart")
BATCH = ("--global-batch", "16")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*SEARCH, "--global-batch", 10**18), "expected at most"),
        ((*SEARCH, *BATCH, "--sequence-length", 10**18), "expected at most"),
        ((*SEARCH, *BATCH, "--micro-batch-per-replica", 10**18), "expected at most"),
        ((*SEARCH, *BATCH, "--what-if", "+999999999 a-mini"), "expected at most 100000"),
        ((*SEARCH, *BATCH, "--what-if", "+1x9 ascend-910b"), "has 8 chips by its file"),
        ((*SEARCH, *BATCH, "--what-if", f"+{'9' * 5000} a-mini"), "is no change"),
        ((*SEARCH, *BATCH, "--budget", "9" * 500 + "h"), "expected a time"),
        (("heteropp.cli.cluster", "init", "--add", "999999999x8 a100"), "expected at most 100000"),
        # an option that the planner does not have
        ((*SEARCH, *BATCH, "--planner", "exact", "--budget", "5s"), "a budget is for planner auto"),
        ((*SEARCH, *BATCH, "--uneven-layers"), "uneven layers are for planner exact; auto"),
        (
            (*SEARCH, *BATCH, "--stage-degrees", "--planner", "zorse"),
            "are for planner exact; zorse",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_requests_are_refused(arguments: tuple, sentence: str, tmp_path: Path) -> None:
    module, *rest = map(str, arguments)
    done = subprocess.run(
        [sys.executable, "-m", module, *rest],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr and done.stderr.count("\n") == 1
    assert not os.listdir(tmp_path)
