"""hyperhetero.garbage: who says when garbage is collected leaves it as it was."""

from __future__ import annotations

import gc
import threading

import pytest

from hyperhetero.garbage import collecting


@pytest.mark.parametrize("before", [True, False])
def test_what_was_comes_back(before: bool) -> None:
    with collecting(before):
        with pytest.raises(LookupError), collecting(False):
            assert not gc.isenabled()
            with collecting(True):
                assert gc.isenabled()
            assert not gc.isenabled()
            raise LookupError
        assert gc.isenabled() == before


def test_no_cycle_is_looked_for_inside() -> None:
    with collecting(False):
        before = [generation["collections"] for generation in gc.get_stats()]
        held = [[number] for number in range(200_000)]
        assert [generation["collections"] for generation in gc.get_stats()] == before
    assert held


def test_whichever_of_two_threads_ends_first_it_is_collected_again() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def search() -> None:
        with collecting(False):
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=search)
    with collecting(False):
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    go_on.set()
    thread.join()
    assert gc.isenabled()
