"""Requests that cannot be met: one sentence, exit code 2, and what would make them possible."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model

from heteropp.cli import search as search_command

REQUESTS = 200


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
    """The one sentence on standard error."""
    with pytest.raises(SystemExit) as ended:
        search_command.app(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2, (arguments, printed.err)
    assert "Traceback" not in printed.err and printed.out == ""
    return printed.err


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
        "--what-if": ["", "b-mini", "+0 b-mini", "-2 b-mini", "+1 z", "-1 a-mini, -1 b-mini"],
        "--cluster": [str(folder), str(folder / "none.toml"), "no-such-preset", ""],
        "--model": [str(folder), str(folder / "none.json"), "no-such-preset", ""],
    }
    seen = set()
    for _ in range(REQUESTS):
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
        boxed = "Invalid value for" in sentence  # typer's own words on options, in a frame
        assert boxed or len(sentence.strip().splitlines()) == 1, sentence
        seen.add(kind)
    assert seen == {*bad_options, "damage"}
