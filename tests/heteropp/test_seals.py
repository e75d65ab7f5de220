"""What a job's processes read in its store is theirs, whoever else writes there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from heteropp.process_groups import seals
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import Seals, StorePart, UntrueError


@pytest.fixture
def store() -> Iterator[Any]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(store: Any) -> dist.Store:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)


def test_a_rank_waits_for_the_word_of_the_rank_itself(store: Any) -> None:
    first, second = (Control(connected(store), rank, 2, 30) for rank in range(2))
    first.publish("process", "of rank 0")
    store.set("control/process/1", "of a stranger")
    heard: list[list[str]] = []
    hearing = threading.Thread(target=lambda: heard.append(first.collect("process")))
    hearing.start()
    hearing.join(0.5)
    assert not heard
    second.publish("process", "of rank 1")
    hearing.join(30)
    assert heard == [["of rank 0", "of rank 1"]]


def test_what_no_rank_overwrites_ends_the_wait(
    store: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seals, "TRUE_S", 0.5)
    control = Control(connected(store), 0, 1, 30)
    store.set("control/first step", "7")
    assert control.announced("first step") is None
    with pytest.raises(UntrueError, match="nobody with this job's secret wrote 'first step'"):
        control.hear("first step")
    told = "somebody without the job's secret wrote 'control/first step' to the job's store"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize(
    "forged",
    ["7", "nothing", "[" * 200_000, '["7", 7]', b"\xff\xfe"],
    ids=["text", "the word nothing", "deep", "number", "bytes"],
)
def test_whatever_a_stranger_writes_is_not_believed(store: Any, forged: str | bytes) -> None:
    store.set("watch/stop", forged)
    found = Seals(StorePart("watch", connected(store))).find("stop")
    assert found is not None and not found.is_true


@pytest.mark.parametrize(
    ("of", "key", "secret"),
    [
        ("attempt 0", "stop", "the job's"),
        ("attempt 1", "finished/0", "the job's"),
        ("attempt 1", "stop", "another"),
    ],
    ids=["part", "key", "secret"],
)
def test_a_seal_is_that_of_one_key_one_start_and_one_secret(
    store: Any, monkeypatch: pytest.MonkeyPatch, of: str, key: str, secret: str
) -> None:
    monkeypatch.setenv("DICOMM_SECRET", secret)
    Seals(StorePart("watch", StorePart(of, connected(store)))).set(key, "")
    value = store.get(f"{of}/watch/{key}")
    monkeypatch.setenv("DICOMM_SECRET", "the job's")
    found = Seals(StorePart("watch", StorePart("attempt 1", connected(store))))
    store.set("attempt 1/watch/stop", value)
    assert found.get("stop") is None
    found.set("stop", "")
    assert found.get("stop") == ""


def test_a_clone_has_the_same_name(store: Any) -> None:
    part = StorePart("control", StorePart("attempt 0", connected(store)))
    Seals(part).set("word", "said")
    assert Seals(part.clone()).get("word") == "said"
