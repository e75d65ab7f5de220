"""dicomm-bench, as a person or a machine runs it."""

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dicomm.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_json_has_every_transport_beside_gloo_and_a_picture_is_drawn(tmp_path):
    picture = tmp_path / "p2p.png"
    run = bench("p2p", "--sizes", "8,64K", "--repeats", "1", "--json", "--plot", str(picture))
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert set(result) == {"tool", "machine", "rows"}
    names = [row["name"] for row in result["rows"]]
    assert sorted(names) == ["shm 64 KiB", "shm 8 B", "tcp 64 KiB", "tcp 8 B"]
    for row in result["rows"]:
        keys = {"name", "unit", "ours", "peer", "peer_name", "ratio", "bar", "better"}
        assert set(row) == keys
        assert row["unit"] == "us" and row["better"] == "lower" and row["bar"] is None
        assert row["ours"] > 0 and row["peer"] > 0
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"], rel=1e-2, abs=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_without_json():
    run = bench("p2p", "--sizes", "8", "--repeats", "1", "--transports", "shm")
    assert run.returncode == 0, run.stderr
    assert "shm 8 B" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "8,tiny"], "'tiny' is not a size"),
        (["--sizes", "-8"], "is not a size"),
        (["--sizes", "0"], "'0' is not a size"),
        (["--sizes", "9G"], "'9G' is not a size"),
        (["--sizes", ""], "is not a size"),
        (["--transports", "shm,pigeon"], "'pigeon' is not one of shm, tcp, gloo"),
        (["--transports", "gloo"], "only the peer"),
        (["--repeats", "0"], "0 is not between"),
        (["--plot", "p2p.gif"], "is not a .png or .svg"),
        (["--plot", "/nowhere/p2p.png"], "there is no folder /nowhere"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_code_2(arguments, words):
    run = bench("p2p", *arguments)
    assert run.returncode == 2
    assert words in run.stderr and run.stderr.count("\n") == 1
    assert run.stdout == ""


def test_help_has_examples():
    run = bench("p2p", "--help")
    assert run.returncode == 0
    assert "dicomm-bench p2p --sizes" in " ".join(run.stdout.split())
