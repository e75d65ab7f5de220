"""A run's n-th sequence depends on the tokens, the seed and n, and on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import HashStore
from training_run import make_plan, tiny_model

from heteropp.data.convert import convert
from heteropp.data.documents import Document
from heteropp.data.integrity import verify
from heteropp.data.permutation import Permutation
from heteropp.data.sequences import Sequences, attention_within
from heteropp.data.source import open_tokens
from heteropp.data.targets import NOT_COUNTED
from heteropp.data.token_file import TokenFile, open_token_file
from heteropp.data.tokenizer import Bytes
from heteropp.description.files import FileError
from heteropp.models.llama.model import LlamaModel
from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.transport import Coordinates
from heteropp.runtime.step.batches import Batches, check_same_data


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


def model_of(length: int) -> LlamaModel:
    return tiny_model(sequence_length=length)


def file_of(
    lengths: list[int], path: Path = Path("x"), answers: np.ndarray | None = None
) -> TokenFile:
    """Documents of these lengths; the tokens count up, so that each says where it stands."""
    ends = np.cumsum(lengths)
    counting = np.arange(ends[-1], dtype=np.uint32)
    return TokenFile(path, counting, ends, "count", "", 256, "", answers)


# ---------------------------------------------------------------- folders of text


def test_tokens_are_the_bytes_of_the_text_files_in_order(text: Path, tmp_path: Path) -> None:
    tokens = open_tokens(text, tmp_path / "cache")
    expected = "first\0second\0third, naïve\0".encode()
    assert bytes(tokens.tokens) == expected
    assert [expected[:end] for end in tokens.ends][:2] == [b"first\0", b"first\0second\0"]


def test_the_cache_follows_the_text(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = open_tokens(text, cache)
    made = sorted(cache.iterdir())
    assert open_tokens(text, cache).sha256 == before.sha256
    assert sorted(cache.iterdir()) == made
    (text / "d.txt").write_text("more")
    after = open_tokens(text, cache)
    assert after.sha256 != before.sha256
    assert bytes(after.tokens).endswith(b"more\0third, na\xc3\xafve\0")


def test_a_flipped_byte_is_found_and_large_files_are_read_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    tokens, read = open_tokens(text, tmp_path / "cache"), list[int]()
    (made,) = (tmp_path / "cache").glob("*.tokens")

    def check(small_bytes: int) -> None:
        verify(tokens, lambda done, total: read.append(total - done), small_bytes)

    check(small_bytes=1 << 30)
    assert read == [0], "all of it"
    check(small_bytes=1 << 30)
    check(small_bytes=0)
    assert len(read) == 3, "nothing is kept of small files"
    check(small_bytes=0)
    assert len(read) == 3, "it is known by now"
    times = made.stat()
    content = bytearray(made.read_bytes())
    content[-1] ^= 1
    made.write_bytes(content)
    os.utime(made, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(FileError, match=r"tokens is damaged: it does not hold .*; remove it"):
        check(small_bytes=0)
    assert len(read) == 4
    moved = made.with_name("moved.tokens")  # where it is the user's own
    made.rename(moved)
    with pytest.raises(FileError, match=r"moved.tokens is damaged.*make it again with heteropp-da"):
        verify(open_token_file(moved))


def test_the_same_text_elsewhere_is_the_same_data(text: Path, tmp_path: Path) -> None:
    before = open_tokens(text, tmp_path / "cache")
    moved = text.rename(tmp_path / "elsewhere")
    assert open_tokens(moved, tmp_path / "other cache").sha256 == before.sha256


def test_processes_that_come_at_once_agree(text: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from heteropp.data.source import open_tokens;"
        "print(bytes(open_tokens(Path(sys.argv[1]), Path(sys.argv[2])).tokens))"
    )
    arguments = [sys.executable, "-c", program, str(text), str(tmp_path / "cache")]
    readers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    read = {reader.communicate(timeout=60)[0] for reader in readers}
    assert len(read) == 1
    assert r"first\x00second\x00" in read.pop()
    assert [path.suffix for path in (tmp_path / "cache").glob("*.*")] == [".tokens"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\0\1\2")
    with pytest.raises(FileError, match="has no text files"):
        open_tokens(tmp_path, tmp_path / "cache")
    with pytest.raises(FileError, match="missing cannot be read: No such file"):
        open_tokens(tmp_path / "missing", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(text: Path) -> None:
    with pytest.raises(FileError, match=r"a\.md/cache cannot be made: Not a directory"):
        open_tokens(text, text / "a.md" / "cache")


def test_file_names_need_not_be_utf_8(text: Path, tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(text / "a") + b"\xe9.txt")).write_text("accent")
    assert b"accent" in bytes(open_tokens(text, tmp_path / "cache").tokens)


# ---------------------------------------------------------------- the order


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_a_permutation_has_every_place_once(count: int, seed: int, epoch: int) -> None:
    order = Permutation(count, seed, epoch).at(np.arange(count))
    assert np.array_equal(np.sort(order), np.arange(count))


def test_a_permutation_of_more_than_memory_holds_is_shuffled_evenly() -> None:
    count = 10**13
    places = np.arange(20_000) + 10**12
    order = Permutation(count, 5, 0).at(places)
    assert order.min() >= 0 and order.max() < count and len(set(order.tolist())) == len(order)
    # neighbours go far apart, evenly: over 16 bins chi-square stays below its 1e-4 quantile
    steps = (order[1:] - order[:-1]) % count
    for values in (order, steps):
        found = np.bincount(values * 16 // count, minlength=16)
        expected = len(values) / 16
        assert ((found - expected) ** 2 / expected).sum() < 44.3


def test_small_permutations_are_all_met() -> None:
    """Each of the 24 orders of four, about as often as the others."""
    found = Counter(tuple(Permutation(4, 0, epoch).at(np.arange(4))) for epoch in range(4800))
    assert len(found) == 24
    assert min(found.values()) > 100 and max(found.values()) < 400


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), length=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_packed_sequences_hold_every_token_once_and_cross_no_document(
    lengths: list[int], length: int
) -> None:
    tokens, model = file_of([length + 1, *lengths]), model_of(length)
    sequences = Sequences(tokens, model, seed=7)
    whole, begins = tokens.tokens.tolist(), {0, *tokens.ends.tolist()}
    expected = [(t, t + 1) for t in range(sequences.count * length)]
    for epoch in (0, 1):
        numbers = range(epoch * sequences.count, (epoch + 1) * sequences.count)
        inputs, targets = sequences.read(numbers)
        pairs = sorted(zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True))
        assert pairs == [(t, NOT_COUNTED if n in begins else n) for t, n in expected]
        assert sequences.counted(numbers) == (targets != NOT_COUNTED).sum()
    assert sequences.count == (len(whole) - 1) // length


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    length=st.integers(1, 24),
    choices=st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_whole_documents_stand_in_one_sequence_and_only_answers_are_learnt(
    lengths: list[int], length: int, choices: Random
) -> None:
    """Each token that is learnt is a target once, behind all of its document that has room."""
    plain = file_of([2, *lengths])
    firsts = {0, *plain.ends.tolist()}
    learnt = {1} | {t for t in range(2, len(plain.tokens)) if choices.random() < 0.4} - firsts
    edges = [(t, t + 1) for t in sorted(learnt)]  # ranges may stand side by side
    for answers, expected in (
        (None, set(range(len(plain.tokens))) - firsts),
        (np.array(edges), learnt),
    ):
        tokens = replace(plain, answers=answers)
        sequences = Sequences(tokens, model_of(length), seed=7, within="document")
        cut = {b for b in sequences.begins.tolist() if b not in firsts}
        begins = np.array([0, *plain.ends])
        for number in (0, sequences.count):
            numbers = range(number, number + sequences.count)
            inputs, targets, documents = sequences.read(numbers)
            counts = targets != NOT_COUNTED
            assert sorted(targets[counts].tolist()) == sorted(expected)
            assert sequences.counted(numbers) == counts.sum()
            assert (targets[counts] == inputs[counts] + 1).all()
            for row, which in zip(inputs, documents, strict=True):
                own = row[which >= 0]
                assert (np.diff(own) == 1).all()
                of = begins.searchsorted(own, "right")
                assert (of - of[:1] == which[which >= 0]).all()
                assert (which[len(own) :] == -1).all()
        for begin, end in pairwise(begins.tolist()):  # only one too long for a sequence is cut
            assert end - begin > length + 1 or not cut & set(range(begin, end))


def test_attention_that_is_not_asked_for_suits_the_data() -> None:
    text, chats = file_of([9, 7]), file_of([9, 7], answers=np.array([[2, 5]]))
    assert attention_within(None, text) == "sequence" != attention_within(None, chats)
    assert attention_within("document", text) == "document"
    assert attention_within("sequence", chats) == "sequence"


def test_epochs_seeds_and_askers() -> None:
    sequences = Sequences(file_of([200]), model_of(4), seed=3)
    assert sequences.count == 49
    whole, _ = sequences.read(range(98))
    assert not np.array_equal(whole[:49], whole[49:])
    assert not np.array_equal(whole, Sequences(file_of([200]), model_of(4), seed=4).read(range(98)))
    for number in (0, 48, 49, 97):  # alone as among others, over the end of an epoch too
        assert np.array_equal(sequences.read([number])[0], whole[number : number + 1])
    mixed, _ = sequences.read([97, 0, 49])
    assert np.array_equal(mixed, whole[[97, 0, 49]])


def test_without_a_seed_the_order_is_the_files_and_ends() -> None:
    sequences = Sequences(file_of([5, 9]), model_of(4))
    inputs, targets = sequences.read(range(5))
    assert inputs[:3].flatten().tolist() == list(range(12))
    assert targets[:3].flatten().tolist() == [1, 2, 3, 4, NOT_COUNTED, *range(6, 13)]
    assert (targets[3:] == NOT_COUNTED).all() and (inputs >= 0).all()
    assert [sequences.counted(range(n)) for n in range(6)] == [0, 4, 7, 11, 11, 11]


def test_layouts_share_out_the_same_sequences() -> None:
    sequences = Sequences(file_of([250]), tiny_model(sequence_length=4), seed=1)
    plain = torch.from_numpy(sequences.read(range(32, 48))[0])
    for dp, tp in (((1, 1), (1, 1)), ((2, 1), (1, 2)), ((4, 2), (2, 1))):
        plan = make_plan(
            tiny_model(sequence_length=4), (2, 2), dp, tp, (False, False), micro_batches=4
        )
        seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for rank in range(plan.world_size):
            place = Coordinates.of(plan, rank)
            batch = Batches(sequences, plan, place, torch.device("cpu")).at(32)
            assert batch.counted == 16 * 4
            if place.tp_index == 0 and batch.tokens is not None:
                seen[True].append(torch.stack(list(batch.tokens)).view(4, -1, 4))
            if place.tp_index == 0 and batch.targets is not None:
                seen[False].append(torch.stack(list(batch.targets)).view(4, -1, 4))
            assert (batch.tokens is None) != (batch.targets is None)
        assert torch.equal(torch.cat(seen[True], 1).view(16, 4), plain)
        assert torch.equal(torch.cat(seen[False], 1).view(16, 4), plain + 1)


def test_what_a_model_cannot_learn_is_refused() -> None:
    with pytest.raises(FileError, match="x has 16 tokens; one sequence needs 17"):
        Sequences(file_of([9, 7]), model_of(16))
    late = file_of([40], answers=np.array([[35, 40]]))
    with pytest.raises(FileError, match="x has no token to learn in its sequences"):
        Sequences(late, model_of(16))
    assert Sequences(late, model_of(16), within="document").counted(range(3)) == 5
    with pytest.raises(FileError, match=r"a vocabulary of 256 tokens .*the model's vocab is 128"):
        Sequences(file_of([99]), tiny_model(vocab=128))


def test_machines_with_other_data_are_refused() -> None:
    store, tokens = HashStore(), file_of([99])
    other = replace(tokens, sha256="other")
    seen = [tokens, tokens, other]
    controls = [Control(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = [
            pool.submit(check_same_data, control, "data", which)
            for control, which in zip(controls, seen, strict=True)
        ]
    said = [str(answer.exception()) for answer in answers]
    assert (
        said[0]
        == said[1]
        == ("x is not the --data that rank 2 reads; expected the same on every machine")
    )
    assert "that rank 0 reads" in said[2]


# ---------------------------------------------------------------- the file


def test_a_token_file_is_a_safetensors_file(tmp_path: Path) -> None:
    """Read by torch's reader, which knows nothing of ours."""
    path = tmp_path / "odd.tokens"
    convert([Document(b"abc", ""), Document(b"de", "")], path, Bytes())
    content = load_file(path)
    assert bytes(content["tokens"].tolist()).rstrip(b"\0") == b"abc\0de"
    assert content["documents"].tolist() == [4, 7]
