"""Batches depend on the text, the seed, the step and the sequence's number, and on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heteropp.training.data import DataError, open_tokens


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text("second")
    (folder / "a.md").write_text("first")
    (folder / "inner" / "c").write_text("third, naïve")
    (folder / "picture").write_bytes(b"\x89PNG\0\0\1")
    (folder / ".hidden").write_text("not seen")
    (folder / "empty").write_text("")
    return folder


def test_tokens_are_the_bytes_of_the_text_files_in_order(text: Path, tmp_path: Path) -> None:
    tokens = open_tokens(text, tmp_path / "cache")
    expected = "first\0second\0third, naïve\0".encode()
    assert bytes(tokens.tokens) == expected


def test_sequences_do_not_depend_on_who_asks(text: Path, tmp_path: Path) -> None:
    tokens = open_tokens(text, tmp_path / "cache")
    whole = tokens.sequences(3, 7, range(6), 4)
    assert whole.shape == (6, 5)
    assert whole.dtype == np.int64
    for index in range(6):
        assert np.array_equal(tokens.sequences(3, 7, [index], 4), whole[index : index + 1])
    assert not np.array_equal(tokens.sequences(3, 8, range(6), 4), whole)
    assert not np.array_equal(tokens.sequences(4, 7, range(6), 4), whole)
    for sequence in whole:
        assert bytes(sequence.astype(np.uint8)) in bytes(tokens.tokens)


def test_the_cache_follows_the_text(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = open_tokens(text, cache)
    assert open_tokens(text, cache).path == before.path
    (text / "d.txt").write_text("more")
    after = open_tokens(text, cache)
    assert after.sha256 != before.sha256
    assert bytes(after.tokens).endswith(b"more\0third, na\xc3\xafve\0")


def test_the_same_text_elsewhere_is_the_same_data(text: Path, tmp_path: Path) -> None:
    before = open_tokens(text, tmp_path / "cache")
    moved = text.rename(tmp_path / "elsewhere")
    assert open_tokens(moved, tmp_path / "other cache").sha256 == before.sha256


def test_processes_that_come_at_once_agree(text: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from heteropp.training.data import open_tokens;"
        "print(open_tokens(Path(sys.argv[1]), Path(sys.argv[2])).path)"
    )
    arguments = [sys.executable, "-c", program, str(text), str(tmp_path / "cache")]
    readers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {reader.communicate(timeout=60)[0].strip() for reader in readers}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes().startswith(b"first\0")
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 1


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\0\1\2")
    with pytest.raises(DataError, match="has no text files"):
        open_tokens(tmp_path, tmp_path / "cache")
    with pytest.raises(DataError, match="is not a folder"):
        open_tokens(tmp_path / "missing", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(text: Path) -> None:
    with pytest.raises(DataError, match=r"a\.md/cache cannot be used: Not a directory"):
        open_tokens(text, text / "a.md" / "cache")


def test_file_names_need_not_be_utf_8(text: Path, tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(text / "a") + b"\xe9.txt")).write_text("accent")
    assert b"accent" in bytes(open_tokens(text, tmp_path / "cache").tokens)


def test_too_little_text_is_refused(text: Path, tmp_path: Path) -> None:
    tokens = open_tokens(text, tmp_path / "cache")
    with pytest.raises(DataError, match=r"has 27 bytes of text; one sequence needs 33"):
        tokens.sequences(0, 0, [0], 32)
