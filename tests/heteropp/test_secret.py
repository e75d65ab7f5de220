"""The job's secret: given by a variable or a file, or drawn once for all who ask."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from dicomm.secret import SecretError, given_secret
from heteropp.description.files import FileError
from heteropp.runtime.ranks.secret import forget_secret, share_secret


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICOMM_SECRET", "")  # restored after the test, as is what a test sets
    monkeypatch.delenv("DICOMM_SECRET_FILE", raising=False)


def test_a_file_of_mode_600_gives_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("of the job\n")
    monkeypatch.setenv("DICOMM_SECRET_FILE", str(path))
    assert given_secret() == "of the job"
    monkeypatch.setenv("DICOMM_SECRET", "of this process")
    assert given_secret() == "of this process"


def test_a_file_that_gives_none_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv("DICOMM_SECRET_FILE", str(path))
    start = f"the job's secret {path} (DICOMM_SECRET_FILE) "
    for mode, content, problem in (
        (None, b"", "cannot be read: No such file or directory"),
        (0o640, b"x", "has mode 640, expected 600: others must not read or change it"),
        (0o600, b" \n", "is empty, expected a line of text"),
        (0o600, b"\xff", "cannot be read: it is no text"),
    ):
        if mode is not None:
            path.write_bytes(content)
            path.chmod(mode)
        with pytest.raises(SecretError) as error:
            given_secret()
        assert str(error.value) == start + problem
        with pytest.raises(FileError) as told:
            share_secret(tmp_path / "run")
        assert str(told.value) == start + problem
    assert not (tmp_path / "run").exists()


def shared(folder: Path, _: int) -> str:
    os.environ["DICOMM_SECRET"] = ""
    share_secret(folder)
    return os.environ["DICOMM_SECRET"]


def test_processes_that_begin_together_share_one_secret(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with multiprocessing.get_context("fork").Pool(8) as pool:
        found = set(pool.starmap(shared, [(folder, i) for i in range(32)]))
        pool.close()  # a test before may have left them a handler of the signal that ends them
        pool.join()
    assert len(found) == 1 and len(found.pop()) == 64
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    forget_secret(folder)
    assert not list(folder.iterdir())
