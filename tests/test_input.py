"""What is wrong with a file or a command line is told at once, in one sentence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forks
import pytest

from ditorch.chips import ChipFileError, load_chip
from heteropp.description.cluster import read_cluster
from heteropp.description.files import FileError

PRESETS = Path(__file__).parents[1] / "ditorch" / "chips"
CLUSTER = '\ufeffname = "x"\n[[nodes]]\nchip = "a-mini"\n'


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return forks.run(["-m", *arguments], {**os.environ, **environment}, timeout_s=100)


def test_every_problem_of_a_file_is_named(tmp_path: Path) -> None:
    chip = tmp_path / "chip.toml"
    lines = (PRESETS / "a100.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("launch_s", "nic_latency_s", "vendor"))]
    chip.write_text("colour = 1\n" + "\n".join(kept).replace("tp_limit       = 8", "tp_limit = 0"))
    with pytest.raises(ChipFileError) as refused:
        load_chip(chip)
    wrong = ("compute.launch_s: missing", "links.nic_latency_s: missing", "vendor: missing")
    for text in (*wrong, "colour: unknown key", "tp_limit: expected at least 1, got 0"):
        assert text in str(refused.value)
    by_the_library = run("ditorch", DITORCH_CHIP=str(chip), DITORCH_VENDOR="emuchip")
    for text in ("compute.launch_s: missing", "vendor: missing", "colour: unknown key"):
        assert text in by_the_library.stderr


def test_of_many_problems_some_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('name = "x"\n' + "[[nodes]]\nchip = 3\n" * 50)
    with pytest.raises(FileError, match=r"nodes\[19\]\.chip: .*; and 30 more$"):
        read_cluster(tmp_path / "cluster.toml")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    assert read_cluster(tmp_path / "cluster.toml").name == "x"
    chip = tmp_path / "chip.toml"
    chip.write_text("\ufeff" + (PRESETS / "a-mini.toml").read_text())
    assert load_chip(chip).chip_type == load_chip("a-mini").chip_type
    assert run("ditorch", DITORCH_CHIP=str(chip), DITORCH_VENDOR="emuchip").returncode == 0


def test_a_plan_needs_no_numerics_and_an_emulated_chip_does(tmp_path: Path) -> None:
    chip = tmp_path / "chip.toml"
    chip.write_text((PRESETS / "a100.toml").read_text().partition("[numerics]")[0])
    assert load_chip(chip).numerics is None
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("a-mini", "chip.toml"))
    assert read_cluster(tmp_path / "cluster.toml").world_size == 8
    emulated = run("ditorch", DITORCH_CHIP=str(chip), DITORCH_VENDOR="emuchip")
    assert "numerics.split_k: missing" in emulated.stderr


def test_a_sum_in_too_many_parts_is_refused(tmp_path: Path) -> None:
    chip = tmp_path / "chip.toml"
    text = (PRESETS / "a100.toml").read_text()
    chip.write_text(text.replace("split_k       = 1", "split_k = 1000000000"))
    with pytest.raises(ChipFileError, match=r"numerics\.split_k: expected at most 4096"):
        load_chip(chip)
    emulated = run("ditorch", DITORCH_CHIP=str(chip), DITORCH_VENDOR="emuchip")
    assert "numerics.split_k: expected at most 4096" in emulated.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("heteropp.cli.train", "--steps", "0"), "'--steps': expected at least 1; see "),
        (("heteropp.cli.search", "--nope"), "No such option: --nope"),
        (("ditorch", "--nope"), "No such option: --nope"),
        (("heteropp.cli.models", "check"), "Missing argument"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert sentence in done.stderr


def test_a_command_alone_shows_its_help() -> None:
    done = run("heteropp.cli.models")
    assert "Usage:" in done.stdout + done.stderr
