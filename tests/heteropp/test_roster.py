"""What becomes of an elastic job's chips: noticed, lost, left, come."""

from __future__ import annotations

from pathlib import Path

from clusters import write_cluster

from heteropp.description.cluster import read_cluster
from heteropp.elastic.decisions.roster import Roster

GOES_AT_S = 1000.0


def roster(folder: Path, chips: dict[str, int] | None = None) -> Roster:
    """Returns a roster of the nodes "a-mini-0", with 3 chips, and "b-mini-0", with 2."""
    path = write_cluster(folder / "cluster.toml", ("a-mini", 3), ("b-mini", 2))
    return Roster.of(read_cluster(path).members, chips)


def test_a_picture_notices_and_brings_chips(tmp_path: Path) -> None:
    found = roster(tmp_path, {"a-mini-0": 2, "b-mini-0": 2})
    assert found.up() == {"a-mini-0/0", "a-mini-0/1", "b-mini-0/0", "b-mini-0/1"}
    found, going, coming = found.offer({"a-mini-0": 3, "b-mini-0": 1}, GOES_AT_S)
    assert (going, coming) == (["b-mini-0/1"], ["a-mini-0/2"])
    assert found.there() - found.up() == {"b-mini-0/1"} and not found.overdue(GOES_AT_S - 1)
    assert found.overdue(GOES_AT_S) == ["b-mini-0/1"]
    assert found.offer({"a-mini-0": 3, "b-mini-0": 2}, GOES_AT_S)[1:] == ([], ["b-mini-0/1"])


def test_a_lost_chip_may_be_the_one_that_a_picture_left_out(tmp_path: Path) -> None:
    found = roster(tmp_path, {"a-mini-0": 3})
    found, *changes = found.offer({"a-mini-0": 2}, GOES_AT_S)
    assert changes == [["a-mini-0/2"], []]
    found = found.lose("a-mini-0/0")  # of the death the picture knew first
    assert found.up() == {"a-mini-0/1", "a-mini-0/2"} and not found.goes_at_s
    found = found.lose("a-mini-0/1")
    assert found.up() == {"a-mini-0/2"} and found.empty_nodes() == {"b-mini-0"}


def test_a_members_own_notice_stands_when_another_is_lost(tmp_path: Path) -> None:
    found = roster(tmp_path, {"a-mini-0": 3})
    noticed = found.notice("a-mini-0/1", GOES_AT_S)
    assert noticed != found and noticed.notice("a-mini-0/1", GOES_AT_S + 1) is noticed
    found = noticed.lose("a-mini-0/0")
    assert found.up() == {"a-mini-0/2"} and found.there() == {"a-mini-0/1", "a-mini-0/2"}
