"""heteropp-data: what stands in its token files, against the libraries themselves; bad input."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import forks
import numpy as np
import pyarrow
import pytest
from commands import run_command
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from heteropp.cli.data import app
from heteropp.data.documents import PIECE_BYTES
from heteropp.data.integrity import verify
from heteropp.data.source import open_tokens
from heteropp.data.token_file import TokenFile, open_token_file
from heteropp.description.files import FileError
from hyperhetero.output import held

TEXTS = [f"The {n}th document, naïve\nand short. " * (n % 4 + 1) for n in range(40)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as models come with: a byte-level BPE that puts <s> before each text."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(3)  # of a model's inputs, not of its training data
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    return folder


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        file.write(lines)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = run_command(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def make(output: Path, *arguments: object) -> TokenFile:
    code, _, stderr = run(*arguments, "--output", output)
    assert code == 0, stderr
    return open_token_file(output)


def documents(file: TokenFile) -> list[list[int]]:
    return [piece.tolist() for piece in np.split(file.tokens, file.ends[:-1])]


def refusal(folder: Path, *arguments: object) -> str:
    """The one sentence of a run that writes nothing."""
    before = sorted(folder.rglob("*"))
    code, stdout, stderr = run(*arguments, "--output", folder / "out.tokens")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert sorted(folder.rglob("*")) == before
    return stderr


def test_documents_become_what_the_tokenizer_makes_of_each(
    tmp_path: Path, vocabulary: Path
) -> None:
    plain = Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    plain.no_truncation()
    expected = [[*plain.encode(text).ids, 1] for text in TEXTS]
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[20:])
    file = make(tmp_path / "j.tokens", tmp_path, "--tokenizer", vocabulary)
    assert documents(file) == expected
    assert file.tokens.dtype == np.uint16 and file.vocabulary == plain.get_vocab_size()
    table = pyarrow.table({"body": TEXTS, "id": list(range(len(TEXTS)))})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=7)
    tokenizer = ("--tokenizer", vocabulary / "tokenizer.json")
    rows = make(tmp_path / "p.tokens", tmp_path / "c.parquet", *tokenizer, "--field", "body")
    assert rows.sha256 == file.sha256
    (tmp_path / "0.txt").write_text(TEXTS[0])
    with gzip.open(tmp_path / "1.txt.gz", "wt") as packed:
        packed.write(TEXTS[1])
    sources = (tmp_path / "1.txt.gz", tmp_path / "0.txt")  # in the order given
    assert documents(make(tmp_path / "t.tokens", *sources, *tokenizer)) == expected[1::-1]
    without = make(tmp_path / "n.tokens", tmp_path / "0.txt", *tokenizer, "--end", "")
    assert documents(without) == [expected[0][:-1]]


def test_equal_input_gives_equal_bytes_and_the_figures_are_the_files(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])  # an empty document is none
    code, stdout, _ = run(source, "-o", tmp_path / "one.tokens", "--json")
    assert code == 0
    (row,) = json.loads(stdout)["files"]
    assert row["documents"] == len(TEXTS)
    assert row["tokens"] == sum(len(text.encode()) + 1 for text in TEXTS)
    file = make(tmp_path / "two.tokens", source)
    assert (tmp_path / "two.tokens").read_bytes() == (tmp_path / "one.tokens").read_bytes()
    assert file.sha256 == row["sha256"]
    assert documents(file) == [[*text.encode(), 0] for text in TEXTS]


def test_a_text_file_may_hold_many_documents(tmp_path: Path) -> None:
    """A file is cut into documents, even where a separator lies across the ends of two reads."""
    texts = ["x" * (PIECE_BYTES - 3), *(f"{n} words " * (n * 37 % 3000) for n in range(99))]
    (tmp_path / "a.txt").write_text("<end>\n".join([*texts, ""]))
    file = make(tmp_path / "x.tokens", tmp_path / "a.txt", "--separator", r"<end>\n")
    assert documents(file) == [[*text.encode(), 0] for text in texts if text]
    whole = make(tmp_path / "y.tokens", tmp_path / "a.txt")
    assert bytes(whole.tokens) == (tmp_path / "a.txt").read_bytes() + b"\0"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffbook".encode())
    (tmp_path / "b.jsonl").write_bytes('\ufeff{"text": "line"}'.encode())
    file = make(tmp_path / "x.tokens", tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert bytes(file.tokens) == b"book\0line\0"


def test_a_long_document_is_split_on_request_and_can_then_be_held_out_in_part(
    tmp_path: Path,
) -> None:
    text = "".join(f"Zeile {n} und noch ein schönes Wort\n" for n in range(200)) + "é" * 999
    (tmp_path / "book.txt").write_text(text)
    options = (tmp_path / "book.txt", "--longest", 500, "--hold-out", 0.3)
    kept = documents(make(tmp_path / "x.tokens", *options))
    held = documents(open_token_file(tmp_path / "x.validation.tokens"))
    assert kept and held
    pieces = [bytes(piece[:-1]) for piece in kept + held]
    assert all(len(piece) <= 500 and piece.decode() in text for piece in pieces)
    assert sum(map(len, pieces)) == len(text.encode())
    lines = [piece for piece in pieces if b"Zeile" in piece]
    assert all(piece.startswith(b"Zeile") and piece.endswith(b"\n") for piece in lines)


def test_tokens_are_as_wide_as_the_vocabulary_asks(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 65_536}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a b b"])
    file = make(tmp_path / "x.tokens", source, "--tokenizer", tmp_path)
    assert documents(file) == [[0, 65_536, 65_536]]
    assert file.vocabulary == 65_537


def test_a_held_out_document_is_held_out_wherever_it_stands(tmp_path: Path) -> None:
    share = ("--hold-out", 0.3)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    kept = documents(make(tmp_path / "x.tokens", source, *share))
    held = documents(open_token_file(tmp_path / "x.validation.tokens"))
    assert sorted(kept + held) == sorted([*text.encode(), 0] for text in TEXTS)
    assert 3 < len(held) < 25
    twice = write_jsonl(tmp_path / "b.jsonl", TEXTS[::-1] + TEXTS)
    make(tmp_path / "y.tokens", twice, *share)
    again = documents(open_token_file(tmp_path / "y.validation.tokens"))
    assert again == held[::-1] + held


def test_what_a_killed_run_left_is_written_over_and_a_running_one_is_not(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    partial = tmp_path / ".out.tokens.partial"
    partial.write_bytes(b"half" * 10_000)
    with held(tmp_path / ".out.tokens.lock", "it"):
        said = refusal(tmp_path, source)
        assert f"out.tokens is used by process {os.getpid()} on host" in said
    file = make(tmp_path / "out.tokens", source)
    assert documents(file) == [[*text.encode(), 0] for text in TEXTS]
    assert not partial.exists()


def refused_by_disk(limit_bytes: int, source: Path, *arguments: object) -> str:
    """A limit on a file's size stands for the disk's; nothing but the source is left."""
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, {(limit_bytes, limit_bytes)});"
        "from heteropp.cli.data import main; main()"
    )
    result = forks.run(["-c", program, *map(str, (source, *arguments))], {}, timeout_s=60)
    assert result.returncode == 2, result.stderr
    assert list(source.parent.iterdir()) == [source]
    return result.stderr


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 100)
    output = tmp_path / "out.tokens"
    message = refused_by_disk(9999, source, "-o", output)
    assert message == f"{output} cannot be written: File too large\n"


def test_what_is_held_out_is_not_there_without_the_rest(tmp_path: Path) -> None:
    """The disk has room for the small file, and for the large one without its documents' ends."""
    source = write_jsonl(tmp_path / "a.jsonl", [str(n) for n in range(1000)])
    message = refused_by_disk(6500, source, "-o", tmp_path / "out.tokens", "--hold-out", 0.1)
    assert "cannot be written: File too large" in message


def test_a_file_that_goes_once_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone.txt"
    for module in ("documents", "source"):
        monkeypatch.setattr(f"heteropp.data.{module}.find_files", lambda *_: [gone])
    assert f"{gone} cannot be read: No such file" in refusal(tmp_path, tmp_path)
    with pytest.raises(FileError, match=r"gone\.txt cannot be used: No such file"):
        open_tokens(tmp_path, tmp_path / "cache")


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It lies so deep that its path is longer than the system takes."""
    name = "d" * 250
    for folder in (own := tmp_path / "own", deep := tmp_path / "deep"):
        folder.mkdir()
    parent = os.open(deep, os.O_DIRECTORY)
    for _ in range(20):
        os.mkdir(name, dir_fd=parent)
        below = os.open(name, os.O_DIRECTORY, dir_fd=parent)
        os.close(parent)
        parent = below
    os.close(parent)
    assert f"{name} cannot be read: File name too long" in refusal(own, deep)


def test_bad_sources_are_refused(tmp_path: Path, vocabulary: Path) -> None:
    def source(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    missing = tmp_path / "missing"
    assert f"{missing} is not there" in refusal(tmp_path, missing)
    torn = source("torn.jsonl", b'{"text": "a"}\n{"text": "b\n')
    assert "torn.jsonl:2 is not JSON" in refusal(tmp_path, torn)
    wrong = source("wrong.jsonl", b'{"text": "a"}\n\n{"text": 5}\n')
    assert "wrong.jsonl:3: 'text' is of type int; expected text" in refusal(tmp_path, wrong)
    assert "wrong.jsonl:1: 'body' is missing" in refusal(tmp_path, wrong, "--field", "body")
    array = source("array.jsonl", b"[1]\n")
    assert "array.jsonl:1 is not a JSON object" in refusal(tmp_path, array)
    half = source("half.jsonl", b'{"text": "\\ud800"}\n')
    assert "half.jsonl:1: 'text' has half of a surrogate pair" in refusal(tmp_path, half)
    binary = source("binary", b"\0\1")
    assert "out.tokens is not written: there is no text for it" in refusal(tmp_path, binary)
    packed = source("packed.txt.gz", gzip.compress(b"text " * 1000)[:-20])
    assert "packed.txt.gz cannot be read: Compressed file ended" in refusal(tmp_path, packed)
    latin = source("latin.txt", b"na\xefve")
    assert "latin.txt is not UTF-8 text" in refusal(tmp_path, latin, "--tokenizer", vocabulary)
    table = source("table.parquet", b"PAR1 no table PAR1")
    assert "table.parquet is not a Parquet file that can be read" in refusal(tmp_path, table)
    numbers = tmp_path / "numbers.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2]}), numbers)
    assert "has no column 'text'; it has n: choose one with --field" in refusal(tmp_path, numbers)
    assert "numbers.parquet, row 1: 'n' is of type int" in refusal(
        tmp_path, numbers, "--field", "n"
    )
    assert "there is no text for it" in refusal(tmp_path, latin, "--hold-out", "1e-9")
    alone = source("alone.txt", b"one document")
    said = refusal(tmp_path, alone, "--hold-out", "0.5")
    assert "of these 1 0.5 was all or none" in said and "--longest" in said
    (tmp_path / "loop").symlink_to("loop")
    assert "Too many levels of symbolic links" in refusal(tmp_path, tmp_path / "loop")


def test_bad_settings_are_refused(tmp_path: Path, vocabulary: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert "--hold-out is 1.0; expected at least 0" in refusal(tmp_path, source, "--hold-out", 1)
    assert "--end names a token of a --tokenizer" in refusal(tmp_path, source, "--end", "</s>")
    tokenizer = ("--tokenizer", vocabulary)
    assert "has no token '<end>'" in refusal(tmp_path, source, *tokenizer, "--end", "<end>")
    missing = ("--tokenizer", tmp_path / "no.json")
    assert "no.json cannot be read: No such file" in refusal(tmp_path, source, *missing)
    assert "a.jsonl is not a tokenizer.json" in refusal(tmp_path, source, "--tokenizer", source)
    code, _, stderr = run(source, "--output", tmp_path)
    assert code == 2 and "is a folder; expected the name of a file" in stderr


def test_without_pyarrow_parquet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    source = tmp_path / "a.parquet"
    source.touch()
    assert "needs pyarrow, which is not installed: pip install 'hyperhetero[parquet]'" in refusal(
        tmp_path, source
    )


def test_files_of_the_version_before_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    file = make(path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    path.write_bytes(path.read_bytes().replace(b'"version": "2"', b'"version": "1"'))
    earlier = open_token_file(path)
    verify(earlier)
    assert documents(earlier) == documents(file) and earlier.sha256 == file.sha256
    assert earlier.answers is None


def test_damaged_token_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    make(path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    whole = path.read_bytes()

    def refused(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(FileError) as caught:
            open_token_file(path)
        return str(caught.value)

    assert "a damaged one" in refused(whole[:-3])
    assert "a damaged one" in refused(b"")
    assert "a damaged one" in refused(b"some text that is longer than a header's length")
    assert "is no token file; of text, `heteropp-data" in refused(
        whole.replace(b"hyperhetero tokens", b"anybody else's    ")
    )
    assert "version is 7; this release reads 1 and 2" in refused(
        whole.replace(b'"version": "2"', b'"version": "7"')
    )
    assert "is a damaged token file" in refused(whole.replace(b'"vocabulary"', b'"vocabulory"'))
