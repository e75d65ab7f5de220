"""A search of plans beside an elastic job's leader, whose process may end before it."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS_EARLY = """
import threading
import torch
from heteropp.elastic.launcher import plan_search
computing = threading.Event()

def replan(*_, **__):
    a = torch.ones(300, 300)
    while True:
        a = (a @ a).clamp(0, 1)  # all but always in torch's C++ code
        computing.set()

class Some:
    members = ()

plan_search.replan, plan_search.stated_capacity = replan, lambda plan: None
for _ in range({searches}):
    plan_search.rehearse_beside(Some, Some, Some)
computing.wait()
print("done")
"""


@pytest.mark.parametrize("searches", [1, 3])
def test_a_process_that_ends_during_a_search_ends_as_it_says(searches: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY.format(searches=searches)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
