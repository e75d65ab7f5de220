"""Which of the job's starts this is: the launcher starts all ranks again when one fails."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from heteropp.runtime.ranks.store import limit_answers, naming_silent_store

COME_S = 60.0  # at least, for processes that start together: their machines may be busy


@cache
def launcher_store(deadline_s: float) -> dist.Store:
    """This process's connection to the launcher's store, which outlives the ranks.

    deadline_s: that it answers in, DistNetworkError after it. Raises StoreSilentError.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    come_s = max(deadline_s, COME_S)
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    with naming_silent_store(host, come_s):
        store = dist.TCPStore(
            host,
            port,
            is_master=os.environ["RANK"] == "0" and not is_launchers,
            timeout=timedelta(seconds=come_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    limit_answers(store, deadline_s)
    return store


@cache
def attempt(deadline_s: float) -> int:
    """How often this rank was started before, the same number for all ranks of a start.

    To be called before anything can fail on one machine alone: a start that a rank does not count
    leaves it behind the others. Raises StoreSilentError.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # several launchers, each of which counts only the failures of its own ranks
    store = launcher_store(deadline_s)
    with naming_silent_store(os.environ["MASTER_ADDR"], deadline_s):
        return store.add(f"starts of rank {os.environ['RANK']}", 1) - 1
