"""Requests that cannot be met: one sentence, exit code 2, and what would make them possible."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model

import ditorch.chips
from heteropp.cli import search as search_command

MALFORMED = 100
IMPOSSIBLE = [(3, 1), pytest.param(80, 4, marks=pytest.mark.exhaustive)]  # and kinds of remedies
PROGRESS = (
    "searching: ",
    "looking for the nearest request",
)  # how a long search shows through a pipe
CHIPS = Path(ditorch.chips.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests")
    write_cluster(path / "cluster.toml", ("a-mini", 2), ("b-mini", 1))
    write_model(path / "model.toml", tiny_model(4))
    large = tiny_model(8, hidden=1024, intermediate=8192, sequence_length=256)
    write_model(path / "large.toml", large)
    write_model(path / "odd.toml", tiny_model(2, vocab=33, intermediate=31))
    return path


def refused(arguments: list[str], capsys) -> str:
    """The sentence on standard error, without the progress of a search that takes longer."""
    with pytest.raises(SystemExit) as ended:
        search_command.app(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2, (arguments, printed.err)
    assert "Traceback" not in printed.err and printed.out == ""
    return re.sub(r"^searching: \d+ s\n", "", printed.err, flags=re.MULTILINE)


def damaged(text: str, generator: random.Random) -> str:
    """A file with one line spoilt so that it says nothing or something impossible."""
    lines = text.splitlines()
    index = generator.choice([i for i, line in enumerate(lines) if not line.startswith("name")])
    key = lines[index].partition("=")[0].strip()
    junk = generator.choice(
        ["-1", "0", "1e99", "nan", '""', '"zigzag"', "[]", "{}", "true", "99999999999999999999"]
    )
    if lines[index].startswith("["):
        lines[index] = generator.choice(["[[knots]]", "[[nodes]", "nodes = 3"])
    else:
        lines[index] = generator.choice(
            [f"{key} = {junk}", f"{key}s = 1", f"{key} =", f"{lines[index]}\n{lines[index]}"]
        )
    return "\n".join(lines)


def test_malformed_requests_are_one_sentence(folder: Path, capsys) -> None:
    """A request with one thing wrong, drawn at random, is refused by that thing's name."""
    generator = random.Random(5)
    good = {
        "--cluster": str(folder / "cluster.toml"),
        "--model": str(folder / "model.toml"),
        "--global-batch": "4",
    }
    bad_options = {
        "--global-batch": ["0", "-4", "x", "1.5", "999999999"],
        "--planner": ["best", "", "EXACT", "exact,metis"],
        "--schedule": ["zigzag", "1F1B", ""],
        "--zero-stage": ["3", "-1", "one"],
        "--micro-batch-per-replica": ["0", "3", "-1", "x"],
        "--budget": ["", "0s", "10", "-5s", "25h", "5 minutes"],
        "--what-if": [
            "",
            "b-mini",
            "+0 b-mini",
            "+999999999 a-mini",
            "-2 b-mini",
            "+1 z",
            "-1 a-mini, -1 b-mini",
        ],
        "--cluster": [str(folder), str(folder / "none.toml"), "no-such-preset", ""],
        "--model": [str(folder), str(folder / "none.json"), "no-such-preset", ""],
    }
    seen = set()
    for _ in range(MALFORMED):
        arguments = dict(good)
        kind = generator.choice([*bad_options, "damage"])
        if kind == "damage":
            option, name = generator.choice([("--cluster", "cluster"), ("--model", "model")])
            spoilt = folder / "spoilt.toml"
            spoilt.write_text(damaged((folder / f"{name}.toml").read_text(), generator))
            arguments[option] = str(spoilt)
        else:
            arguments[kind] = generator.choice(bad_options[kind])
        flat = [text for pair in arguments.items() for text in pair]
        sentence = refused(flat, capsys)
        assert len(sentence.strip().splitlines()) == 1, sentence
        seen.add(kind)
    assert seen == {*bad_options, "damage"}


@pytest.mark.parametrize(("requests", "kinds"), IMPOSSIBLE)
def test_impossible_requests_say_what_would_make_them_possible(
    folder: Path, capsys, requests: int, kinds: int
) -> None:
    """Random small requests: of each one refused, the first remedy named is accepted."""
    generator = random.Random(11)
    remedied: set[str] = set()
    impossible = 0
    while impossible < requests:
        arguments = random_request(folder, generator)
        try:
            search_command.app(arguments)
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        if code == 0:
            continue
        impossible += 1
        lines = printed.err.strip().splitlines()
        said = [line for line in lines if not line.startswith(PROGRESS)]
        assert code == 2 and len(said) == 1, (arguments, printed.err)
        if "no single change" in printed.err:
            continue
        named = re.search(r"; possible: .*?\((--[^)]*)\)", printed.err)
        assert named, (arguments, printed.err)
        remedied.add(named[1].split()[0])
        with pytest.raises(SystemExit) as ended_again:
            search_command.app([*arguments, *shlex.split(named[1])])
        assert ended_again.value.code == 0, (arguments, printed.err, capsys.readouterr().err)
        capsys.readouterr()
    assert len(remedied) >= kinds, remedied


def random_request(folder: Path, generator: random.Random) -> list[str]:
    """Too little memory, too many chips for the layers, a batch that divides badly, or none."""
    chips = generator.sample(["a", "b", "c"], generator.choice([1, 2, 3]))
    entries = []
    for chip in chips:
        text = (CHIPS / f"{chip}-mini.toml").read_text()
        capacity = int(2 ** generator.uniform(19, 24))
        text = re.sub(r"(?m)^capacity_bytes.*$", f"capacity_bytes = {capacity}", text)
        text = re.sub(r"(?m)^tp_limit.*$", f"tp_limit = {generator.choice([1, 2])}", text)
        (folder / f"{chip}.toml").write_text(text)
        entries.append((f"{chip}.toml", generator.choice([1, 2, 3, 4])))
    hidden = generator.choice([32, 64, 128])
    model = tiny_model(
        generator.randint(1, 8), hidden=hidden, intermediate=2 * hidden, sequence_length=64
    )
    return [
        *("--cluster", str(write_cluster(folder / "random.toml", *entries))),
        *("--model", str(write_model(folder / "random-model.toml", model))),
        *("--global-batch", str(generator.choice([1, 2, 3, 6, 7, 8, 16]))),
        *("--planner", generator.choice(["exact", "exact", "heteroauto", "uniform", "zorse"])),
        *("--schedule", generator.choice(["1f1b", "gpipe"])),
        *("--zero-stage", generator.choice(["0", "1"])),
        *("--micro-batch-per-replica", str(generator.choice([1, 1, 2, 4]))),
    ]
